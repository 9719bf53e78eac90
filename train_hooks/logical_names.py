"""Logical names at every border: gather expert parameters by logical expert id."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import nn

from train_hooks.expert_state import MATRICES, ExpertState
from train_hooks.layout import ExpertLayout


@torch.no_grad()
def gather_experts(
    layout: ExpertLayout,
    state: ExpertState,
    value: Callable[[nn.Parameter], torch.Tensor | None] = lambda param: param.data,
) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Yield (layer number, matrix name, tensor `[logical expert, out, in]`) on every rank.

    `value` picks what to gather of each parameter, such as itself or its `main_grad`.
    Collective over the EP group. Readers never see a slot number (cases.md, case 1).
    """
    group = mpu.get_expert_model_parallel_group()
    for number, experts in state.parameters.items():
        order = torch.as_tensor(layout.expert_of_slot(number))
        for index, matrix in enumerate(MATRICES):
            local = torch.stack([value(params[index]) for params in experts])
            gathered = [torch.empty_like(local) for _ in range(group.size())]
            dist.all_gather(gathered, local, group=group)
            by_slot = torch.cat(gathered)
            by_expert = torch.empty_like(by_slot)
            by_expert[order] = by_slot
            yield number, matrix, by_expert


@torch.no_grad()
def scatter_experts(
    layout: ExpertLayout, state: ExpertState, layer_number: int, matrix: str, source: torch.Tensor
) -> None:
    """Write `source` `[logical expert, out, in]` into this rank's slots of one matrix."""
    index = MATRICES.index(matrix)
    for local_index, params in enumerate(state.parameters[layer_number]):
        expert = layout.logical_expert(layer_number, state.ep_rank, local_index)
        params[index].data.copy_(source[expert])
