"""Times the training region of one train rank and logs a rollout through slime's own trackers."""

from __future__ import annotations

import importlib
import json
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from app.slime.config import SlimeConfig
from app.slime.messages import Placed, PlannedRollout, PlanReport
from app.slime.seams import ACTOR

STEP_KEY = "rollout/step"
PREFIX = "routepack/"

logger = logging.getLogger(__name__)


class RankReport:
    """Collects one rank's seconds; the main rank writes the log and tells the planner."""

    def __init__(self, args: Any, config: SlimeConfig):
        self.args, self.config = args, config
        self.train_seconds = 0.0
        self._defined = False

    def time_training(self, counting: Callable[[], AbstractContextManager[None]]) -> None:
        """Put a clock, and `counting`, around `train` of slime's actor module, here only."""
        module = importlib.import_module(ACTOR)
        train = module.train

        def timed(*args: Any, **kwargs: Any) -> Any:
            import torch.distributed as dist
            from slime.utils.distributed_utils import get_gloo_group

            dist.barrier(group=get_gloo_group())
            started = time.perf_counter()
            try:
                with counting():
                    return train(*args, **kwargs)
            finally:
                self.train_seconds = time.perf_counter() - started

        module.train = timed

    def log(
        self,
        rollout: PlannedRollout,
        placed: Placed,
        times: dict[str, float],
        commit: dict[str, float],
        *,
        seconds: float,
        executed: np.ndarray | None = None,
    ) -> None:
        """Reduce over ranks and log; collective over the world, called by every rank."""
        import torch
        import torch.distributed as dist
        from slime.backends.megatron_utils.initialize import is_megatron_main_rank
        from slime.utils.distributed_utils import get_gloo_group

        slowest = torch.tensor(
            [self.train_seconds, times["time/batch_await"], times["exposed_ms"], seconds],
            dtype=torch.float64,
        )
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=get_gloo_group())
        sent = torch.tensor([commit["bytes"]], dtype=torch.float64)
        dist.all_reduce(sent, group=get_gloo_group())
        if not is_megatron_main_rank():
            return
        import ray

        report: PlanReport = ray.get(rollout.planner.report.remote(rollout.rollout_id, executed))
        metrics = rollout_metrics(
            report,
            times,
            train_seconds=slowest[0].item(),
            batch_await=slowest[1].item(),
            exposed_ms=slowest[2].item(),
            work_seconds=slowest[3].item(),
            num_moved=commit["moved"],
            moved_mb=sent.item() / 2**20,
        )
        self._write(rollout.rollout_id, placed.policy, metrics, report)
        rollout.planner.measured.remote(
            placed.policy,
            report.slime_cost,
            metrics["time/train"],
            metrics["exposed_ms"] / 1e3,
        )

    def _write(
        self, rollout_id: int, policy: str, metrics: dict[str, float], report: PlanReport
    ) -> None:
        from slime.observability import logging_utils
        from slime.observability.metric_utils import compute_rollout_step

        step = compute_rollout_step(self.args, rollout_id)
        entry: dict[str, Any] = {PREFIX + name: value for name, value in metrics.items()}
        entry[STEP_KEY] = step
        logger.info("routepack %d (%s): %s", rollout_id, policy, json.dumps(metrics))
        self._define_axis()
        logging_utils.log(self.args, entry, step_key=STEP_KEY)
        every = self.config.log.heatmap_every
        if every and rollout_id % every == 0 and report.loads is not None:
            self._log_heatmap(step, report.loads)
        if self.config.log.folder:
            folder = Path(self.config.log.folder)
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"metrics-{self.args.routepack_policy}.jsonl"
            with path.open("a") as lines:
                lines.write(json.dumps({STEP_KEY: step, "policy": policy, **metrics}) + "\n")

    def _define_axis(self) -> None:
        """wandb draws a new prefix over its own counter until it is told the axis."""
        if self._defined or not self.args.use_wandb:
            return
        import wandb

        wandb.define_metric(f"{PREFIX}*", step_metric=STEP_KEY)
        self._defined = True

    def _log_heatmap(self, step: int, loads: tuple[np.ndarray, np.ndarray]) -> None:
        if not self.args.use_wandb:
            return
        import wandb

        wandb.log({PREFIX + "rank_load": wandb.Image(heatmap(*loads)), STEP_KEY: step})


def rollout_metrics(
    report: PlanReport,
    times: dict[str, float],
    *,
    train_seconds: float,
    batch_await: float,
    exposed_ms: float,
    work_seconds: float,
    num_moved: float,
    moved_mb: float,
) -> dict[str, float]:
    """One rollout's metrics by short name (docs/metrics.md); pure.

    work_seconds: log-probs and training of the slowest rank. moved_mb: host copies included.
    """
    return {
        **report.figures,
        **times,
        "tps": report.num_tokens / train_seconds if train_seconds > 0 else 0.0,
        "window_seconds": work_seconds + exposed_ms / 1e3,
        "exposed_ms": exposed_ms,
        "time/train": train_seconds,
        "time/batch_await": batch_await,
        "place/moved_experts": num_moved,
        "place/moved_mb": moved_mb,
    }


def heatmap(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """uint8 picture of load `[layer, EP rank]` before and after, side by side; white is uniform.

    Black is twice the uniform load or more.
    """
    parts = []
    for load in (before, after):
        share = load / np.maximum(load.mean(axis=1, keepdims=True), 1e-9)
        shade = 255 - np.clip((share - 1.0) * 255, 0, 255)
        parts.append(np.kron(shade, np.ones((8, 8))).astype(np.uint8))
    gap = np.full((parts[0].shape[0], 8), 255, np.uint8)
    return np.concatenate([parts[0], gap, parts[1]], axis=1)
