"""The embedded training loop: seal, place, admit, train, log, hand the weights back."""

from __future__ import annotations

import app.local.cpu_megatron  # isort: skip  # noqa: F401  before megatron

import json
import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from app.config import RunConfig
from app.local import checkpoint
from app.local.admit import admit
from app.local.equivalence import check_engines
from app.local.grpo import advantages
from app.local.rollout import sample_window
from app.local.session import open_session
from app.local.trainer import grpo_step_inputs
from app.metrics import STEP_KEY, window_metrics
from app.plots import plot_rank_load
from app.progress import track
from app.wandb_log import WandbLog
from planner.placement import Placement, rank_load
from rollout_hooks.admission import PlannerCalls
from rollout_hooks.estimate import demand_shares

logger = logging.getLogger(__name__)


def train_rank(
    config: RunConfig,
    policy: str,
    weights: str,
    output: str,
    calls: PlannerCalls,
    server_url: str | None = None,
    resume: str | None = None,
) -> list[dict[str, float]]:
    """Train up to window `config.train.num_windows` under `policy`; return each window's metrics.

    resume: a checkpoint folder to go on from; its layout comes back with it.
    """
    is_writer = dist.get_rank() == 0
    session = open_session(config, weights, server_url)
    trainer, engine = session.trainer, session.engine
    log = WandbLog(config.wandb, policy, Path(output), asdict(config)) if is_writer else None
    history: list[dict[str, float]] = []
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

        admitted = admit(config, trainer, rollout.window, policy, calls)
        micro_batches, loss = grpo_step_inputs(
            rollout.trajectories, advantage, admitted.plan, config.train.ratio_clip
        )
        step = trainer.step(micro_batches, loss)

        export_started = time.perf_counter()
        engine.update_weights(trainer.bridge.export())
        export_seconds = time.perf_counter() - export_started
        shares = demand_shares(rollout.window.demand)
        num_fallbacks += admitted.fallback is not None
        if config.train.save_every and (window_id + 1) % config.train.save_every == 0:
            folder = Path(output) / f"checkpoint-{policy}-{window_id + 1}"
            checkpoint.save(trainer, folder, window_id + 1, config.train.checkpoint_format)
        if not is_writer:
            continue
        metrics = window_metrics(
            rollout,
            admitted,
            step,
            time_aux=time_aux,
            export_seconds=export_seconds,
            num_fallbacks=num_fallbacks,
        )
        if window_id == first_window:
            start = {k: v for k, v in asdict(check).items() if v is not None}
            metrics |= {f"start/{name}": value for name, value in start.items()}
        log.log(window_id, metrics)
        history.append({STEP_KEY: window_id, **metrics})
    if is_writer and history:
        _write_results(Path(output), policy, history, log, rollout, admitted)
        log.finish()
    return history


def _write_results(folder: Path, policy: str, history, log, rollout, admitted) -> None:
    lines = [json.dumps(metrics) for metrics in history]
    (folder / f"metrics-{policy}.jsonl").write_text("\n".join(lines) + "\n")
    window, placement = rollout.window, admitted.plan.placement
    identity = Placement.identity(window.num_layers, window.num_experts, placement.num_ep_ranks)
    picture = folder / f"rank-load-{policy}.png"
    plot_rank_load(
        rank_load(window.expert_load, identity),
        rank_load(window.expert_load, placement),
        window.layer_numbers,
        picture,
    )
    log.log_image(window.window_id, "rank_load", picture)


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
        **{
            name.replace("start/", "train."): v
            for name, v in history[0].items()
            if "start/" in name
        },
    }
