"""Everything that belongs to an expert, read by logical id: the witness of an exact move."""

from __future__ import annotations

import torch
import torch.distributed as dist

from train_hooks.expert_state import MATRICES, ExpertState
from train_hooks.layout import ExpertLayout

ExpertKey = tuple[int, int, str, str, int]


@torch.no_grad()
def state_by_expert(layout: ExpertLayout, state: ExpertState) -> dict[ExpertKey, torch.Tensor]:
    """Gather a copy of all expert state of this stage on every rank.

    Keys are (layer number, logical expert, matrix, tensor name, EDP replica); the replica is -1
    for optimizer tensors, whose shards are joined over the EDP ranks. Meant for tests and for
    `routepack verify`: it moves all expert state through every rank.
    """
    mine, names = [], state.optimizer_keys()
    for number, experts in state.parameters.items():
        for local_index, params in enumerate(experts):
            expert = layout.logical_expert(number, state.ep_rank, local_index)
            for matrix, param in zip(MATRICES, params):
                key = (number, expert, matrix)
                mine.append(
                    ((*key, "parameter", state.edp_rank), 0, param.data.reshape(-1).clone())
                )
                for owner, low, high in state.owners(param):
                    if owner != state.edp_rank:
                        continue
                    for name in names:
                        offset, flat = state.optimizer_shard(param, name)
                        piece = flat[low - offset : high - offset].clone()
                        mine.append(((*key, name, -1), low, piece))
    everyone: list = [None] * state.group.size()
    dist.all_gather_object(everyone, mine, group=state.group)
    parts: dict[ExpertKey, list[tuple[int, torch.Tensor]]] = {}
    for key, low, piece in (entry for entries in everyone for entry in entries):
        parts.setdefault(key, []).append((low, piece))
    return {
        key: torch.cat([piece for _, piece in sorted(pieces, key=lambda p: p[0])])
        for key, pieces in sorted(parts.items())
    }


def num_different(a: dict[ExpertKey, torch.Tensor], b: dict[ExpertKey, torch.Tensor]) -> int:
    """Count tensors that are not equal bit for bit, keys present on one side only included."""
    return sum(key not in a or key not in b or not torch.equal(a[key], b[key]) for key in {*a, *b})


def max_difference(a: dict[ExpertKey, torch.Tensor], b: dict[ExpertKey, torch.Tensor]) -> float:
    """Return the largest absolute difference over tensors of equal keys."""
    if a.keys() != b.keys():
        raise ValueError(f"different keys: {sorted({*a} ^ {*b})[:4]}")
    return max(((a[k].float() - b[k].float()).abs().max().item() for k in a), default=0.0)
