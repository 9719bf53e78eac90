"""Order-independent checksums of expert state by logical id: proof of a move on demand."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from planner.placement import Placement
from train_hooks.expert_state import MATRICES, ExpertState

ODD = 0x9E3779B97F4A7C15 - (1 << 64)


def checksums(
    state: ExpertState, placement: Placement, layers: dict[int, int], keys: tuple[str, ...]
) -> torch.Tensor:
    """Return int64 `[layer, logical expert, matrix, tensor]`, alike on every rank.

    layers: global number -> row of `placement`, the layers to sum. The tensors are the model
    parameter, summed over its EDP replicas, and `keys`, joined over their shards. Each element
    counts by its bits and its position, modulo 2^64, so that a shard can be summed where it lies.
    """
    num_experts = placement.num_experts
    per_rank = num_experts // placement.num_ep_ranks
    device = next(iter(state.parameters.values()))[0][0].device
    shape = (len(layers), num_experts, len(MATRICES), 1 + len(keys))
    sums = torch.zeros(shape, dtype=torch.int64, device=device)
    for index, (number, row) in enumerate(layers.items()):
        for local_index, params in enumerate(state.parameters[number]):
            slot = state.ep_rank * per_rank + local_index
            expert = int(placement.expert_of_slot[row, slot])
            for m, param in enumerate(params):
                sums[index, expert, m, 0] += _bits(param.data.view(-1), 0)
                for owner, low, high in state.owners(param):
                    if owner != state.edp_rank:
                        continue
                    for k, key in enumerate(keys):
                        offset, flat = state.optimizer_shard(param, key)
                        part = _bits(flat[low - offset : high - offset], low)
                        sums[index, expert, m, 1 + k] += part.to(device)
    dist.all_reduce(sums, group=state.group)
    return sums


def describe_difference(
    before: torch.Tensor, after: torch.Tensor, layers: dict[int, int], keys: tuple[str, ...]
) -> str | None:
    """Name what differs between two checksums, or return None."""
    wrong = np.argwhere((before != after).cpu().numpy())
    if not len(wrong):
        return None
    numbers, names = list(layers), ("parameter", *keys)
    index, expert, matrix, tensor = (int(i) for i in wrong[0])
    return (
        f"{len(wrong)} tensors differ by logical id, the first in MoE layer {numbers[index]}, "
        f"expert {expert}: {names[tensor]} of {MATRICES[matrix]}"
    )


def _bits(values: torch.Tensor, first_position: int) -> torch.Tensor:
    if not values.numel():
        return torch.zeros((), dtype=torch.int64, device=values.device)
    integer = {2: torch.int16, 4: torch.int32}[values.element_size()]
    bits = values.contiguous().view(integer).to(torch.int64)
    positions = torch.arange(first_position, first_position + len(bits), device=values.device)
    return ((bits + 1) * (2 * positions + 1) * ODD).sum()
