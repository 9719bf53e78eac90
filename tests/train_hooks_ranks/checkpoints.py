"""What the rank processes of test_checkpoints.py do."""

from __future__ import annotations

import app.local.cpu_megatron  # isort: skip  # noqa: F401  before megatron

from pathlib import Path

import torch.distributed as dist

from app.local import checkpoint
from app.local.trainer import LocalTrainer
from app.local.verify import random_placement
from train_hooks.state_by_expert import state_by_expert
from train_hooks_ranks.moves import move, trained


def everything(trainer) -> dict:
    """Expert state by logical id with one replica, and every other parameter by name."""
    experts = {
        (k[0], k[1], k[2], k[3]): v
        for k, v in state_by_expert(trainer.layout, trainer.state).items()
        if k[4] <= 0
    }
    dense = {n: t for n, t in trainer.bridge.export().items() if ".experts." not in n}
    return {str(k): v for k, v in {**experts, **dense}.items()}


def save_under_a_moved_layout(config, folder: str, fmt: str) -> dict:
    """Train, move, save; return all state and the placement."""
    trainer, inputs, _ = trained(config)
    move(trainer, random_placement(trainer.layout.placement(), 3))
    checkpoint.save(trainer, Path(folder), 5, fmt)
    placement = trainer.layout.placement()
    state = everything(trainer)
    loss = trainer.step(*inputs).loss
    return {"state": state, "placement": placement.expert_of_slot, "loss": loss}


def load_elsewhere(config, folder: str) -> dict:
    """Load into a fresh trainer of other sizes; return all state and what was resumed."""
    trainer = LocalTrainer(config)
    resumed = checkpoint.load(trainer, Path(folder))
    dist.barrier()
    return {
        "state": everything(trainer),
        "placement": trainer.layout.placement().expert_of_slot,
        "next_window": resumed.next_window,
        "layout_restored": resumed.layout_restored,
    }
