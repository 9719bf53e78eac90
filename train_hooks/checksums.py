"""Order-independent checksums of expert state by logical id: proof of a move on demand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from planner.placement import Placement
from train_hooks.expert_state import ExpertState, StateKind
from train_hooks.inventory import Slice

ODD = 0x9E3779B97F4A7C15 - (1 << 64)


Labels = tuple[tuple[int, int, str, str], ...]


class Checksums(NamedTuple):
    """sums: int64, one a label; labels: (layer number, logical expert, owned name, tensor)."""

    sums: torch.Tensor
    labels: Labels


def checksums(
    state: ExpertState,
    placement: Placement,
    layers: dict[int, int],
    kinds: Mapping[str, Sequence[StateKind]],
) -> Checksums:
    """Sum everything of every expert that is on this rank, by logical id.

    Added over the ranks of `ExpertState.group` the sums do not depend on where experts are.

    layers: global number -> row of `placement`, the layers to sum. kinds: the optimizer's tensors
    by owned name. An owned tensor is summed over its EDP replicas, optimizer state joined over its
    shards. Each element counts by its bits and its position, modulo 2^64, so that a shard can be
    summed where it lies.
    """
    per_rank = placement.num_experts // placement.num_ep_ranks
    labels = [
        (number, expert, name, tensor)
        for number in layers
        for expert in range(placement.num_experts)
        for name in state.inventory[number].names
        for tensor in ("itself", *(kind.key for kind in kinds.get(name, ())))
    ]
    index = {label: place for place, label in enumerate(labels)}
    device = state.layout.device
    sums = torch.zeros(len(labels), dtype=torch.int64, device=device)
    for number, row in layers.items():
        layer = state.inventory[number]
        for local_index, parts in enumerate(layer.experts):
            expert = int(placement.expert_of_slot[row, state.ep_rank * per_rank + local_index])
            for name, part in zip(layer.names, parts):
                sums[index[number, expert, name, "itself"]] += _bits(part.live().view(-1), 0)
                for key, low, values in shards_here(state, part, kinds.get(name, ())):
                    sums[index[number, expert, name, key]] += _bits(values, low).to(device)
    return Checksums(sums, tuple(labels))


def shards_here(
    state: ExpertState, part: Slice, kinds: Sequence[StateKind]
) -> Iterator[tuple[str, int, torch.Tensor]]:
    """(key, first element in `part`, values) of this rank's optimizer state of one expert's part.

    Factors count as one element at the start of their shard.
    """
    ranges = [(low, high) for owner, low, high in state.owners(part) if owner == state.edp_rank]
    held = state.shard(part.tensor) if ranges and kinds else None
    for low, high in ranges:
        for kind in kinds:
            if kind.factor:
                yield kind.key, low, held.factors[kind.key]
            else:
                start = part.start + low - held.start
                yield kind.key, low, held.elements[kind.key][start : start + high - low]


def describe_difference(before: Checksums, after: Checksums) -> str | None:
    """Name what differs between two checksums, or return None."""
    wrong = np.flatnonzero((before.sums != after.sums).cpu().numpy())
    if not len(wrong):
        return None
    number, expert, name, tensor = before.labels[wrong[0]]
    return (
        f"{len(wrong)} tensors differ by logical id, the first in MoE layer {number}, "
        f"expert {expert}: {tensor} of {name}"
    )


def _bits(values: torch.Tensor, first_position: int) -> torch.Tensor:
    if not values.numel():
        return torch.zeros((), dtype=torch.int64, device=values.device)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[
        values.element_size()
    ]
    bits = values.contiguous().view(integer).to(torch.int64)
    positions = torch.arange(first_position, first_position + len(bits), device=values.device)
    return ((bits + 1) * (2 * positions + 1) * ODD).sum()
