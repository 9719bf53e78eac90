"""`routepack train`: the embedded trainer under one policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from app.config import RunConfig
from app.local.metrics import STEP_KEY
from app.local.ranks import run_ranks
from app.local.rollout_server import rollout_server
from app.local.self_calibration import RowTimes, measured_rows
from app.local.train import TrainRun, summary, train_rank
from app.local.warmup import ensure_warm
from app.report.write import checked_page, write_results
from app.results.progress import print_table
from rollout_hooks.admission import PlannerCalls


def train(
    config: RunConfig,
    policy: str,
    output: Path,
    json_path: str | None = None,
    num_windows: int | None = None,
    calls: PlannerCalls | None = None,
    resume: str | None = None,
    report: str | None = None,
    row_times: RowTimes = measured_rows,
) -> dict[str, float]:
    """Train, print one line per window and a summary, write wandb, JSONL, PNG; return figures.

    report: an HTML page to write as well.
    """
    if report is not None:
        checked_page(report, "--report")
    if num_windows is not None:
        config = replace(config, train=replace(config.train, num_windows=num_windows))
    output.mkdir(parents=True, exist_ok=True)
    weights = ensure_warm(config)
    with rollout_server(config, weights) as url:
        run: TrainRun = run_ranks(
            train_rank,
            config,
            policy,
            str(weights),
            str(output),
            calls or PlannerCalls(),
            url,
            resume,
            row_times,
        )
    history = run.history
    if not history:
        raise ValueError(
            f"nothing to train: {resume} is already at window {config.train.num_windows}; raise "
            "--windows"
        )
    figures = summary(policy, history)
    details = {
        "policy": policy,
        "windows": history,
        "steps": run.steps,
        "rank_load": run.rank_load,
        "rows": run.rows,
    }
    write_results("train", figures, {}, details, json_path, report)
    header = (
        "window",
        "reward",
        "TPS",
        "window s",
        "exposed ms",
        "rows",
        "J/B",
        "moved",
        "loss",
        "clipped",
    )
    rows = [
        [
            str(m[STEP_KEY]),
            f"{m['reward']:.3f}",
            f"{m['tps']:,.0f}",
            f"{m['window_seconds']:.2f}",
            f"{m['exposed_ms']:.0f}",
            f"{m['plan/rows']:.0f}",
            f"{m['plan/J1_over_B']:.3f}",
            f"{m['place/moved_experts']:.0f}",
            f"{m['loss']:+.4f}",
            f"{m['clip_fraction']:.2%}",
        ]
        for m in history
    ]
    print_table(f"{config.name}, policy {policy}", header, rows)
    if "train.equal_rows" in figures:
        print(
            f"same weights, two engines: log-probs differ by "
            f"{figures['train.max_log_prob_difference']:.1e}, equal routing on "
            f"{figures['train.equal_rows']:.3%} of rows"
        )
    print(
        f"TPS {figures['train.tps']:,.0f} (token-weighted), reward "
        f"{figures['train.reward_first']:.3f} -> {figures['train.reward_last']:.3f}, fallbacks "
        f"{figures['train.fallback']:.0f}; metrics, wandb files and picture in {output}"
    )
    return figures
