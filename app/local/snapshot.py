"""A copy of everything a step changes, so that policies start a window from the same state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from app.local.trainer import LocalTrainer
from planner.placement import Placement
from train_hooks.moe_layers import unwrap


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """Parameters, persistent buffers, optimizer state, random state and layout of one rank."""

    tensors: list[torch.Tensor]
    optimizer_states: list[dict[Any, dict[str, Any]]]
    random_state: torch.Tensor
    placement: Placement


def take_snapshot(trainer: LocalTrainer) -> Snapshot:
    """Copy the state of this rank; the layout is remembered, not changed."""
    return Snapshot(
        tensors=[tensor.clone() for tensor in _live_tensors(trainer)],
        optimizer_states=[
            {param: _copied(state) for param, state in optimizer.state.items()}
            for optimizer in _torch_optimizers(trainer)
        ],
        random_state=torch.get_rng_state(),
        placement=trainer.layout.placement(),
    )


@torch.no_grad()
def restore(trainer: LocalTrainer, snapshot: Snapshot) -> None:
    """Put the state of `snapshot` back, its layout included."""
    for tensor, saved in zip(_live_tensors(trainer), snapshot.tensors, strict=True):
        tensor.copy_(saved)
    for optimizer, states in zip(_torch_optimizers(trainer), snapshot.optimizer_states):
        optimizer.state.clear()
        for param, state in states.items():
            optimizer.state[param] = _copied(state)
    torch.set_rng_state(snapshot.random_state)
    trainer.layout.finish_change(snapshot.placement)


def _live_tensors(trainer: LocalTrainer) -> list[torch.Tensor]:
    model = unwrap(trainer.ddp)
    buffers = [b for n, b in model.named_buffers() if n.endswith("expert_bias")]
    return [param.data for param in model.parameters()] + buffers


def _torch_optimizers(trainer: LocalTrainer) -> list[torch.optim.Optimizer]:
    return [part.optimizer for part in trainer.optimizer.chained_optimizers]


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if torch.is_tensor(v) else v for k, v in state.items()}
