"""How uneven the experts' load is, with the configured skew of the routers and without."""

from __future__ import annotations

import app.local.cpu_megatron  # isort: skip  # noqa: F401  before megatron

import numpy as np
import torch
import torch.distributed as dist

from app.local.admit import admit
from app.local.rollout import SampledWindow
from app.local.session import Session
from app.local.trainer import grpo_step_inputs
from planner.placement import Placement, rank_load
from rollout_hooks.admission import PlannerCalls


@torch.no_grad()
def measure_skew(session: Session, rollout: SampledWindow) -> tuple[float, float]:
    """Mean rank max/mean of the same tokens with the routers' skew taken off, and with it."""
    routers = [layer.router for layer in session.trainer.layout.layers.values()]
    identity = Placement.identity(
        rollout.window.num_layers, rollout.window.num_experts, session.config.ranks.ep
    )
    biases = [router.expert_bias.clone() for router in routers]
    for router in routers:
        router.expert_bias.zero_()
    without = _routed_load(session, rollout)
    for router, bias in zip(routers, biases):
        router.expert_bias.copy_(bias)
    with_skew = rank_max_over_mean(rollout.window.expert_load, identity)
    return rank_max_over_mean(without, identity), with_skew


def _routed_load(session: Session, rollout: SampledWindow) -> np.ndarray:
    """`[layer, expert]` tokens that the trainer's own routers choose for the window's tokens."""
    trainer = session.trainer
    plan = admit(session.config, trainer, rollout.window, "off", PlannerCalls()).plan
    zeros = np.zeros(len(rollout.trajectories))
    micro_batches, _ = grpo_step_inputs(rollout.trajectories, zeros, plan, 0.2)
    counts: dict[int, torch.Tensor] = {}
    hooks = []
    for number, layer in trainer.layout.layers.items():
        counts[number] = torch.zeros(trainer.layout.num_experts, dtype=torch.int64)

        def add(router, args, output, total=counts[number]):
            total += output[1].sum(dim=0)

        hooks.append(layer.router.register_forward_hook(add, prepend=True))
    for batch in micro_batches:
        trainer.ddp(
            batch.tokens,
            batch.position_ids,
            None,
            labels=batch.labels,
            packed_seq_params=batch.packed,
        )
    for hook in hooks:
        hook.remove()
    total = torch.stack(list(counts.values()))
    dist.all_reduce(total)
    return total.numpy()


def rank_max_over_mean(expert_load: np.ndarray, placement: Placement) -> float:
    """Mean over layers of the busiest EP rank's load over the mean rank's."""
    load = rank_load(expert_load, placement)
    return float((load.max(axis=1) / load.mean(axis=1)).mean())
