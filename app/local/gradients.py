"""Whole gradients under transformers' names, whatever the optimizer's shards."""

from __future__ import annotations

import torch
import torch.distributed as dist

from app.local.trainer import LocalTrainer

TINY_NORM = 1e-8


@torch.no_grad()
def gather_gradients(trainer: LocalTrainer) -> dict[str, torch.Tensor]:
    """Return every gradient by logical name after `step(update=False)`; collective.

    The distributed optimizer leaves each data-parallel rank with its own shard of a bucket; the
    shards are gathered first.
    """
    for buffer in (*trainer.ddp.buffers, *trainer.ddp.expert_parallel_buffers):
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)
    return trainer.bridge.export(lambda param: getattr(param, "main_grad", None))


def gradient_difference(
    reference: dict[str, torch.Tensor], other: dict[str, torch.Tensor]
) -> tuple[float, list[str]]:
    """Return (max over tensors of |g - g'|_2 / |g|_2, tensors with |g|_2 < 1e-8, listed apart)."""
    worst, tiny = 0.0, []
    for name, gradient in reference.items():
        norm = gradient.norm().item()
        if norm < TINY_NORM:
            tiny.append(name)
            continue
        worst = max(worst, (gradient - other[name]).norm().item() / norm)
    return worst, tiny
