"""Logical names at every border: gather expert parameters by logical expert id."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import nn

from train_hooks.expert_state import ExpertState
from train_hooks.layout import ExpertLayout


@torch.no_grad()
def gather_experts(
    layout: ExpertLayout,
    state: ExpertState,
    value: Callable[[nn.Parameter], torch.Tensor | None] = lambda param: param.data,
) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Yield (layer number, owned name, tensor `[logical expert, ...]`) on every rank.

    Every parameter that experts own, such as `linear_fc1.weight`, `[logical expert, out, in]`.
    `value` picks what to gather of each parameter, such as itself or its `main_grad`.
    Collective over the EP group. Readers never see a slot number (cases.md, case 1).
    """
    group = mpu.get_expert_model_parallel_group()
    for number, layer in state.inventory.items():
        order = torch.as_tensor(layout.expert_of_slot(number))
        for index, name in enumerate(layer.names):
            parts = [slices[index] for slices in layer.experts]
            if not isinstance(parts[0].tensor, nn.Parameter):
                continue
            local = torch.stack([part.of(value(part.tensor)) for part in parts])
            gathered = [torch.empty_like(local) for _ in range(group.size())]
            dist.all_gather(gathered, local, group=group)
            by_slot = torch.cat(gathered)
            by_expert = torch.empty_like(by_slot)
            by_expert[order] = by_slot
            yield number, name, by_expert


@torch.no_grad()
def scatter_experts(
    layout: ExpertLayout, state: ExpertState, layer_number: int, name: str, source: torch.Tensor
) -> None:
    """Write `source` `[logical expert, ...]` into this rank's slots of what experts own as `name`.

    Raises KeyError for a name that no expert of the layer owns.
    """
    layer = state.inventory[layer_number]
    if name not in layer.names:
        raise KeyError(f"experts of layer {layer_number} own {layer.names}, not {name}")
    index = layer.names.index(name)
    for local_index, slices in enumerate(layer.experts):
        expert = layout.logical_expert(layer_number, state.ep_rank, local_index)
        slices[index].live().copy_(source[expert])
