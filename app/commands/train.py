"""`routepack train`: the embedded trainer under one policy."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from app.commands.arguments import add_report, add_run, positive, run_config
from app.config import RunConfig
from app.report.write import checked_page, write_results
from app.results.progress import print_table
from app.results.wandb_log import STEP_KEY
from planner.policies import COMPARED, POLICIES
from rollout_hooks.admission import PlannerCalls

if TYPE_CHECKING:
    from app.local.self_calibration import RowTimes


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_run(command)
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument("--policy", choices=POLICIES)
    what.add_argument(
        "--online", action="store_true", help="let several policies learn, and compare the rewards"
    )
    command.add_argument(
        "--policies",
        nargs="+",
        choices=POLICIES,
        default=list(COMPARED),
        help=f"of --online (default {' '.join(COMPARED)})",
    )
    command.add_argument("--windows", type=positive, metavar="N", help="windows to train")
    command.add_argument("--seeds", type=positive, metavar="N", help="of --online")
    command.add_argument("--output", metavar="DIR", help="default runs/train or runs/online")
    command.add_argument("--resume", metavar="DIR", help="checkpoint folder to go on from")
    add_report(command)


def run(arguments: argparse.Namespace) -> int | None:
    config = run_config(arguments)
    if arguments.online:
        from app.commands.train_online import train_online

        if arguments.resume:
            raise ValueError("--resume: an online comparison starts every run anew; leave it out")
        train_online(
            config,
            tuple(arguments.policies),
            Path(arguments.output or Path("runs") / "online"),
            arguments.json,
            num_windows=arguments.windows,
            num_seeds=arguments.seeds,
            report=arguments.report,
        )
        return

    train(
        config,
        arguments.policy,
        Path(arguments.output or "runs/train"),
        arguments.json,
        arguments.windows,
        resume=arguments.resume,
        report=arguments.report,
    )


def train(
    config: RunConfig,
    policy: str,
    output: Path,
    json_path: str | None = None,
    num_windows: int | None = None,
    calls: PlannerCalls | None = None,
    resume: str | None = None,
    report: str | None = None,
    row_times: RowTimes | None = None,
) -> dict[str, float]:
    """Train, print one line per window and a summary, write wandb, JSONL, PNG; return figures.

    report: an HTML page to write as well. row_times: clock of the rows; None measures them.
    """
    from app.local.ranks import run_ranks
    from app.local.rollout_server import rollout_server
    from app.local.self_calibration import measured_rows
    from app.local.train import TrainRun, summary, train_rank
    from app.local.warmup import ensure_warm

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
            row_times or measured_rows,
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
