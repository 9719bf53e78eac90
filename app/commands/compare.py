"""`routepack compare`: policies on the same windows, as ratios with intervals."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from app.commands.arguments import add_report, add_run, run_config
from app.config import RunConfig
from app.local.measurement import CONTROL, IDEAL, Comparison, Measurement
from app.report.write import checked_page, write_results
from app.results.progress import print_table
from app.results.statistics import Spread, spread
from app.results.wandb_log import WandbLog
from planner.policies import BASE, COMPARED, FULL_OVER_OFF, OFF, POLICIES

QUICK = dict(num_windows=4, num_repeats=2)
MIN_WINDOWS = 10
BUSY_CORES = 0.3
RATIOS = {
    f"tps_{above}_over_{below}": (above, below)
    for above, below in (FULL_OVER_OFF, ("full", BASE), ("reroute", BASE), (BASE, OFF))
} | {f"{BASE}_over_{BASE}": (CONTROL, BASE)}


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_run(command)
    command.add_argument("--policies", nargs="+", choices=POLICIES, default=list(COMPARED))
    command.add_argument("--quick", action="store_true", help="4 windows, 2 repeats")
    command.add_argument("--output", metavar="DIR", help="default runs/compare")
    add_report(command)


def run(arguments: argparse.Namespace) -> int | None:
    policies = tuple(arguments.policies)
    compare(
        run_config(arguments),
        policies,
        Path(arguments.output or "runs/compare"),
        arguments.json,
        arguments.quick,
        arguments.report,
    )


def compare(
    config: RunConfig,
    policies: tuple[str, ...],
    output: Path,
    json_path: str | None,
    quick: bool,
    report: str | None = None,
) -> dict[str, float]:
    """Measure, print the table, write wandb runs, PNG, JSON and page; return the figures."""
    from app.local.paired_windows import compare_rank
    from app.local.ranks import run_ranks
    from app.local.rollout_server import rollout_server
    from app.local.warmup import ensure_warm
    from app.results.plots import plot_rank_load

    if report is not None:
        checked_page(report, "--report")
    if quick:
        config = replace(config, compare=replace(config.compare, **QUICK))
    policies = tuple(dict.fromkeys((OFF, BASE, *policies)))
    output.mkdir(parents=True, exist_ok=True)
    weights = ensure_warm(config)
    with rollout_server(config, weights) as url:
        result = run_ranks(compare_rank, config, policies, str(weights), url)
    figures, skipped = comparison_figures(result, policies)
    _write_wandb(config, result, policies, output)
    picture = output / "rank-load.png"
    load = result.rank_load
    plot_rank_load(
        np.array(load["before"]), np.array(load["after"]), load["layer_numbers"], picture
    )
    details = {
        "config": asdict(config),
        "num_windows": config.compare.num_windows,
        "measurements": [asdict(m) for m in result.measurements],
        "other_load_cores": result.other_load,
        "rank_load": result.rank_load,
        "rows": result.rows,
    }
    write_results("compare", figures, skipped, details, json_path, report)
    _print(config, result, policies, figures, skipped, picture)
    return figures


def comparison_figures(
    result: Comparison, policies: tuple[str, ...]
) -> tuple[dict[str, float], dict[str, str]]:
    """Return (figures, skipped with reasons) of a finished comparison."""
    by_policy = measurements_by_policy(result)
    figures: dict[str, float] = {}
    skipped: dict[str, str] = {}
    for name, (above, below) in RATIOS.items():
        if above not in by_policy or below not in by_policy:
            skipped[f"compare.{name}.median"] = f"policy {above} or {below} was not compared"
            continue
        figures |= tps_ratio(by_policy, above, below).figures(f"compare.{name}")
    for policy in policies:
        runs = by_policy[policy]
        figures[f"compare.tps.{policy}"] = _aggregate_tps(runs)
        ratio = [m.rank_max_over_mean for m in runs]
        figures[f"compare.expert_max_over_mean.{policy}"] = float(np.mean(ratio))
        if policy == "off":
            continue
        seconds = [m.window_seconds / o.window_seconds for m, o in zip(runs, by_policy["off"])]
        figures |= spread(seconds).figures(f"compare.window_seconds_{policy}_over_off")
        share = headroom_share(by_policy, policy)
        if share is None:
            skipped[f"compare.headroom_share.{policy}"] = (
                "forced balance was not faster than off on this machine: there is no headroom"
            )
        else:
            figures[f"compare.headroom_share.{policy}"] = share
    figures["compare.tps.ideal"] = _aggregate_tps(by_policy[IDEAL])
    figures |= tps_ratio(by_policy, IDEAL, "off").figures("compare.tps_ideal_over_off")
    figures["compare.loss_max_rel_diff"] = _loss_difference(by_policy, policies)
    figures["compare.skew_max_over_mean.without"] = result.skew[0]
    figures["compare.skew_max_over_mean.with"] = result.skew[1]
    figures["compare.start_max_log_prob_difference"] = result.max_log_prob_difference
    figures["compare.start_equal_rows"] = result.equal_rows
    figures["compare.other_load_cores"] = result.other_load
    return figures, skipped


def measurements_by_policy(result: Comparison) -> dict[str, list[Measurement]]:
    """Group the measurements by policy, in the order of the windows."""
    grouped: dict[str, list[Measurement]] = {}
    for m in sorted(result.measurements, key=lambda m: m.window):
        grouped.setdefault(m.policy, []).append(m)
    return grouped


def tps_ratio(by_policy: dict[str, list[Measurement]], above: str, below: str) -> Spread:
    """Spread over windows of the ratio of median TPS."""
    pairs = zip(by_policy[above], by_policy[below], strict=True)
    return spread([a.median_tps / b.median_tps for a, b in pairs])


def headroom_share(by_policy: dict[str, list[Measurement]], policy: str) -> float | None:
    """(policy - off) / (ideal - off) of token-weighted TPS; None without headroom."""
    off, ideal = _aggregate_tps(by_policy["off"]), _aggregate_tps(by_policy[IDEAL])
    if ideal <= off * 1.005:
        return None
    return (_aggregate_tps(by_policy[policy]) - off) / (ideal - off)


def _aggregate_tps(runs: list[Measurement]) -> float:
    """Harmonic mean of the windows' medians: all windows hold about the same tokens."""
    return len(runs) / sum(1 / m.median_tps for m in runs)


def _loss_difference(by_policy, policies: tuple[str, ...]) -> float:
    """Largest relative difference from off; a window without advantages has no scale of its own."""
    return max(
        abs(m.loss - o.loss) / (o.loss_magnitude or 1.0)
        for policy in policies
        for m, o in zip(by_policy[policy], by_policy["off"])
    )


def _write_wandb(config: RunConfig, result: Comparison, policies, output: Path) -> None:
    by_policy = measurements_by_policy(result)
    for policy in policies:
        log = WandbLog(policy, output, asdict(config), tags=["compare"])
        for m in by_policy[policy]:
            log.log(
                m.window,
                {
                    "tps": m.median_tps,
                    "window_seconds": m.window_seconds,
                    "exposed_ms": 1e3 * m.exposed,
                    "time/commit": m.commit_seconds,
                    "place/moved_experts": float(m.moved_experts),
                    "place/moved_mb": m.moved_mb,
                    "plan/rows": float(m.rows),
                    "loss": m.loss,
                },
            )
        log.finish()


def _print(config, result: Comparison, policies, figures, skipped, picture: Path) -> None:
    by_policy = measurements_by_policy(result)
    rows: list[list[Any]] = []
    for policy in (*policies, CONTROL, IDEAL):
        runs = by_policy[policy]
        ratio = tps_ratio(by_policy, policy, "off")
        share = figures.get(f"compare.headroom_share.{policy}")
        timed = policy != IDEAL
        rows.append(
            [
                policy,
                f"{_aggregate_tps(runs):,.0f}",
                f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]",
                f"{np.median([m.window_seconds for m in runs]):.2f}" if timed else "-",
                f"{1e3 * np.median([m.exposed for m in runs]):.0f}" if timed else "-",
                f"{np.mean([m.rows for m in runs]):.1f}",
                f"{np.mean([m.rank_max_over_mean for m in runs]):.3f}",
                f"{np.mean([m.moved_experts for m in runs]):.1f}" if timed else "-",
                "-" if share is None else f"{100 * share:.0f}%",
            ]
        )
    header = (
        "policy",
        "TPS",
        "TPS / off [95%]",
        "window s",
        "exposed ms",
        "rows",
        "rank max/mean",
        "experts moved",
        "of ideal",
    )
    title = f"{config.name}: {config.compare.num_windows} windows, paired, medians of repeats"
    print_table(title, header, rows)
    print(
        f"routing skew (seeded expert bias, std {config.routing_skew.expert_bias_std:g}): rank "
        f"max/mean {result.skew[0]:.3f} without, {result.skew[1]:.3f} with"
    )
    print(
        f"same weights, two engines: log-probs differ by {result.max_log_prob_difference:.1e}, "
        f"equal routing on {result.equal_rows:.3%} of rows; losses of all policies agree to "
        f"{figures['compare.loss_max_rel_diff']:.1e}"
    )
    control = tps_ratio(by_policy, CONTROL, "base")
    if not control.low <= 1.0 <= control.high:
        print(
            f"note: the base/base control is {control.median:.3f} [{control.low:.3f}, "
            f"{control.high:.3f}] and misses 1.00: the machine was not quiet, do not trust "
            "differences of this size"
        )
    if config.compare.num_windows < MIN_WINDOWS:
        print(f"note: fewer than {MIN_WINDOWS} windows; the intervals are rough")
    if result.other_load > BUSY_CORES:
        print(f"note: other processes used {result.other_load:.2f} cores meanwhile")
    for name, reason in skipped.items():
        print(f"skipped {name}: {reason}")
    print(f"picture: {picture}")
