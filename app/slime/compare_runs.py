"""`python -m app.slime.compare_runs FOLDER`: the paired table of launch/grpo_*.sh --compare.

FOLDER/<name>/metrics-<policy>.jsonl are the runs of one rollout dump under each policy; `observe`
executes slime's own schedule and stands for off, `ideal` is the same with forced balance. Rollouts
are paired by step, the first is warm-up.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from app.results.figures import write_figures
from app.results.progress import print_table
from app.results.statistics import spread
from planner.policies import POLICIES

EXECUTED = tuple(name for name, policy in POLICIES.items() if policy.executes)
NAMES = ("observe", *EXECUTED, "ideal")


def read_run(folder: Path) -> dict[int, dict[str, float]]:
    """Metrics by rollout step; later lines of a repeated step win."""
    found: dict[int, dict[str, float]] = {}
    for path in sorted(folder.glob("metrics-*.jsonl")):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            found[int(entry["rollout/step"])] = entry
    return found


def compare_runs(folder: Path) -> tuple[dict[str, float], dict[str, str], list[list[str]]]:
    """(figures, skipped, table rows) of all runs against `observe`; ValueError without it."""
    runs = {name: read_run(folder / name) for name in NAMES}
    reference = runs["observe"]
    if len(reference) < 2:
        raise ValueError(
            f"{folder}/observe: {len(reference)} rollouts measured, expected at least 2 (the first "
            "is warm-up); look at that job's log first"
        )
    figures, skipped, rows = {}, {}, []
    for name, run in runs.items():
        steps = sorted(set(run) & set(reference))[1:]
        if not steps:
            skipped[f"cluster.tps_{name}_over_off"] = "no rollout in common with observe"
            continue
        ratios = [run[s]["tps"] / reference[s]["tps"] for s in steps]
        windows = [run[s]["window_seconds"] / reference[s]["window_seconds"] for s in steps]
        exposed = sum(run[s].get("exposed_ms", 0.0) for s in steps) / len(steps)
        moved = sum(run[s].get("place/moved_experts", 0.0) for s in steps) / len(steps)
        tps = spread(ratios)
        figures |= tps.figures(f"cluster.tps_{name}_over_off")
        figures |= spread(windows).figures(f"cluster.window_seconds_{name}_over_off")
        rows.append(
            [
                "off (observe)" if name == "observe" else name,
                str(len(steps)),
                f"{tps.median:.3f}",
                f"[{tps.low:.3f}, {tps.high:.3f}]",
                f"{spread(windows).median:.3f}",
                f"{exposed:.1f}",
                f"{moved:.0f}",
            ]
        )
    top = figures.get("cluster.tps_ideal_over_off.median", 1.0) - 1.0
    if top > 0:
        for name in EXECUTED:
            median = figures.get(f"cluster.tps_{name}_over_off.median")
            if median is not None:
                figures[f"cluster.headroom_share.{name}"] = (median - 1.0) / top
    else:
        skipped["cluster.headroom_share"] = "forced balance is not faster than slime's own schedule"
    return figures, skipped, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures, skipped, rows = compare_runs(options.folder)
    header = ["policy", "rollouts", "TPS / off", "95%", "window / off", "exposed ms", "moved"]
    print_table("One rollout dump under every policy", header, rows)
    for name in EXECUTED:
        share = figures.get(f"cluster.headroom_share.{name}")
        if share is not None:
            print(f"{name} takes {share:.0%} of the headroom of perfectly balanced routing")
    for name, reason in skipped.items():
        print(f"skipped {name}: {reason}")
    write_figures(options.json, "compare_runs", figures, skipped)


if __name__ == "__main__":
    main()
