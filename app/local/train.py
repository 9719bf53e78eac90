"""The embedded training loop: seal, place, admit, train, log, hand the weights back."""

from __future__ import annotations

import app.local.cpu_megatron  # isort: skip  # noqa: F401  before megatron

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from app.config import RunConfig
from app.local import checkpoint
from app.local.admit import Admitted, admit
from app.local.equivalence import check_engines
from app.local.grpo import advantages
from app.local.metrics import window_metrics
from app.local.rollout import SampledWindow, sample_window
from app.local.self_calibration import RowTimes, SelfCalibration, measured_rows
from app.local.session import open_session
from app.local.steps import rollout_inputs
from app.local.trainer import StepResult
from app.results.plan_details import rank_load_detail, rows_beside_off
from app.results.plots import plot_rank_load
from app.results.progress import track
from app.results.wandb_log import STEP_KEY, WandbLog
from planner.placement import Placement, rank_load
from rollout_hooks.admission import PlannerCalls
from rollout_hooks.estimate import demand_shares


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRun:
    """What rank 0 saw of a run; the other ranks return it empty.

    history: metrics of every window. steps: of every window, figures of each optimizer step.
    rank_load, rows: of the last window, as the report draws them (`app.results.plan_details`).
    """

    history: list[dict[str, float]]
    steps: list[list[dict[str, float]]]
    rank_load: dict[str, Any]
    rows: dict[str, Any]


def train_rank(
    config: RunConfig,
    policy: str,
    weights: str,
    output: str,
    calls: PlannerCalls,
    server_url: str | None = None,
    resume: str | None = None,
    row_times: RowTimes = measured_rows,
) -> TrainRun:
    """Train up to window `config.train.num_windows` under `policy`; return what happened.

    resume: a checkpoint folder to go on from; its layout comes back with it.
    row_times: where self-calibration takes row times from.
    """
    is_writer = dist.get_rank() == 0
    session = open_session(config, weights, server_url)
    trainer, engine = session.trainer, session.engine
    calibration = SelfCalibration(config, row_times)
    log = WandbLog(policy, Path(output), asdict(config)) if is_writer else None
    history: list[dict[str, float]] = []
    step_figures: list[list[dict[str, float]]] = []
    shares, num_fallbacks, first_window = None, 0, 0
    if resume is not None:
        first_window = checkpoint.load(trainer, Path(resume)).next_window
        engine.update_weights(trainer.bridge.export())
    windows = range(first_window, config.train.num_windows)
    for window_id in track(windows, f"train {policy}", is_writer):
        rollout = sample_window(config, engine, window_id, shares)
        if window_id == first_window:
            check = check_engines(trainer, rollout)
        sealed = time.perf_counter()
        advantage = advantages(rollout.rewards, rollout.window.group)
        time_aux = time.perf_counter() - sealed

        admitted = admit(
            config,
            trainer,
            rollout.window,
            policy,
            calls,
            num_steps=config.train.num_steps_per_rollout,
            cost=calibration.cost,
        )
        started = time.perf_counter()
        reference = session.reference_log_probs(rollout.trajectories)
        time_log_probs = time.perf_counter() - started
        inputs = rollout_inputs(
            config, rollout.trajectories, advantage, admitted.plans, admitted.positions, reference
        )
        steps = [trainer.step(micro_batches, loss) for micro_batches, loss in inputs]

        started = time.perf_counter()
        engine.update_weights(trainer.bridge.export())
        export_seconds = time.perf_counter() - started
        shares = demand_shares(rollout.window.demand)
        num_fallbacks += admitted.fallback is not None
        if config.train.save_every and (window_id + 1) % config.train.save_every == 0:
            folder = Path(output) / f"checkpoint-{policy}-{window_id + 1}"
            checkpoint.save(
                trainer,
                folder,
                window_id + 1,
                config.train.checkpoint_format,
                asynchronous=config.train.checkpoint_async,
            )
        if not is_writer:
            continue
        metrics = window_metrics(
            rollout,
            admitted,
            steps,
            time_aux=time_aux,
            time_log_probs=time_log_probs,
            export_seconds=export_seconds,
            num_fallbacks=num_fallbacks,
        )
        metrics |= calibration.add(admitted, steps)
        if reference is not None:
            metrics["kl"] = sum(step.kl for step in steps) / len(steps)
        if window_id == first_window:
            start = {k: v for k, v in asdict(check).items() if v is not None}
            metrics |= {f"start/{name}": value for name, value in start.items()}
        log.log(window_id, metrics)
        every = config.wandb.heatmap_every
        if window_id + 1 == config.train.num_windows or (every and (window_id + 1) % every == 0):
            _log_rank_load(log, rollout, admitted, Path(output) / f"rank-load-{policy}.png")
        history.append({STEP_KEY: window_id, **metrics})
        step_figures.append(_figures_of(steps))
    trainer.committer.settle()
    if not (is_writer and history):
        return TrainRun(history=[], steps=[], rank_load={}, rows={})
    lines = [json.dumps(metrics) for metrics in history]
    Path(output, f"metrics-{policy}.jsonl").write_text("\n".join(lines) + "\n")
    log.finish()
    return TrainRun(
        history=history,
        steps=step_figures,
        rank_load=rank_load_detail(rollout.window, _identity(admitted), admitted.plan.placement),
        rows=rows_beside_off(
            admitted.plan,
            admitted.windows[0],
            config.topology,
            calibration.cost,
            _identity(admitted),
        ),
    )


def _identity(admitted: Admitted) -> Placement:
    placement = admitted.plan.placement
    return Placement.identity(*placement.expert_of_slot.shape, placement.num_ep_ranks)


def _log_rank_load(
    log: WandbLog, rollout: SampledWindow, admitted: Admitted, picture: Path
) -> None:
    """Draw the window's rank loads under identity and under its placement, and log the picture."""
    window = rollout.window
    plot_rank_load(
        rank_load(window.expert_load, _identity(admitted)),
        rank_load(window.expert_load, admitted.plan.placement),
        window.layer_numbers,
        picture,
    )
    log.log_image(window.window_id, "rank_load", picture)


def _figures_of(steps: Sequence[StepResult]) -> list[dict[str, float]]:
    names = ("loss", "grad_norm", "clip_fraction", "kl", "tps")
    return [
        {name: getattr(step, name) for name in names} | {"rows": float(len(step.row_seconds))}
        for step in steps
    ]


LAST = ("kl", "calibrate/drift", "calibrate/r2")
"""Metrics that only some runs have; the last window's goes into the figures."""


def summary(policy: str, history: list[dict[str, float]]) -> dict[str, Any]:
    """Figures of a finished run; TPS is token-weighted (definitions.md, Throughput)."""
    seconds = sum(m["time/train"] for m in history)
    positions = sum(m["tps"] * m["time/train"] for m in history)
    return {
        "train.tps": positions / seconds,
        "train.window_seconds": sum(m["window_seconds"] for m in history) / len(history),
        "train.exposed_ms": sum(m["exposed_ms"] for m in history) / len(history),
        "train.reward_first": history[0]["reward"],
        "train.reward_last": history[-1]["reward"],
        "train.rows": sum(m["plan/rows"] for m in history) / len(history),
        "train.moved_experts": sum(m["place/moved_experts"] for m in history),
        "train.fallback": history[-1]["fallback"],
        "train.clip_fraction": sum(m["clip_fraction"] for m in history) / len(history),
        **{
            f"train.{name.replace('/', '.')}": history[-1][name]
            for name in LAST
            if name in history[-1]
        },
        **{
            name.replace("start/", "train."): v
            for name, v in history[0].items()
            if "start/" in name
        },
    }
