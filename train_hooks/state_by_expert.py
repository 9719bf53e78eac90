"""Everything that belongs to an expert, read by logical id: the witness of an exact move."""

from __future__ import annotations

import torch
import torch.distributed as dist

from train_hooks.checksums import shards_here
from train_hooks.expert_state import ExpertState
from train_hooks.layout import ExpertLayout

ExpertKey = tuple[int, int, str, str, int]


@torch.no_grad()
def state_by_expert(layout: ExpertLayout, state: ExpertState) -> dict[ExpertKey, torch.Tensor]:
    """Gather a copy of all expert state of this stage on every rank.

    Keys are (layer number, logical expert, owned name, tensor name, EDP replica); the tensor is
    `itself` or an optimizer key. The replica is -1 for optimizer tensors, whose shards are joined
    over the EDP ranks. Meant for tests and for `routepack verify`: it moves all expert state
    through every rank.
    """
    mine, kinds = [], state.kinds()
    for number, layer in state.inventory.items():
        for local_index, parts in enumerate(layer.experts):
            expert = layout.logical_expert(number, state.ep_rank, local_index)
            for name, part in zip(layer.names, parts):
                key = (number, expert, name)
                mine.append(((*key, "itself", state.edp_rank), 0, part.live().reshape(-1).clone()))
                for tensor, low, values in shards_here(state, part, kinds.get(name, ())):
                    mine.append(((*key, tensor, -1), low, values.clone()))
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
