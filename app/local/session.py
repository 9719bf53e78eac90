"""What every rank of the embedded trainer opens before its first window."""

from __future__ import annotations

import app.local.cpu_megatron  # isort: skip  # noqa: F401  before megatron

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist

from app.config import RunConfig
from app.local.engine import EmbeddedEngine, RolloutEngine
from app.local.model import build_hf
from app.local.reference import ReferenceModel
from app.local.trainer import LocalTrainer
from app.local.warmup import starting_weights
from planner.warm_up import compile_planner
from rollout_hooks.trajectory import Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """The sampler and the trainer of one rank, at the same weights.

    reference: those weights frozen, with `train.use_kl_loss`.
    """

    config: RunConfig
    engine: RolloutEngine
    trainer: LocalTrainer
    reference: ReferenceModel | None = None

    def reference_log_probs(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray] | None:
        """Of the response tokens of every trajectory; None without a reference. Collective."""
        return None if self.reference is None else self.reference.log_probs(trajectories)


def open_session(
    config: RunConfig, weights: str, server_url: str | None = None, **megatron_changes
) -> Session:
    """Build both engines, load `weights` into them, and compile the planner on rank 0."""
    hf = build_hf(config.model, config.routing_skew, config.seed)
    hf.load_state_dict(starting_weights(weights))
    trainer = LocalTrainer(config, **megatron_changes)
    trainer.bridge.load(hf.state_dict())
    if dist.get_rank() == 0:
        compile_planner(config.cost, config.planner_options(), pp=config.topology.pp)
    dist.barrier()
    engine: RolloutEngine = EmbeddedEngine(hf, config.seed)
    if server_url is not None:
        from app.local.sglang_engine import SglangEngine

        engine = SglangEngine(server_url, hf)
    reference = ReferenceModel(config, weights) if config.train.use_kl_loss else None
    return Session(config=config, engine=engine, trainer=trainer, reference=reference)
