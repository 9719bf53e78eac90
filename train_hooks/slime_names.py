"""Logical expert names at slime's one naming point, slot names for what stays on this rank.

slime names every parameter in `_named_params_and_buffers_global`
(backends/megatron_utils/update_weight/common.py): weight sync, HF saves and HF loading all read it.
There a local expert i of EP rank p is called `weight{p * n + i}`: its slot. `ExpertNames` puts the
logical id in that place. Host copies keep slot names: a name then always means the same tensor of
the same rank, and a move permutes values, not names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from planner.placement import Placement

_EXPERT = re.compile(
    r"(?P<head>.*\bdecoder\.layers\.(?P<layer>\d+)\.mlp\.experts\..*\.\D+)(?P<slot>\d+)"
)
Named = Iterator[tuple[str, torch.Tensor]]


def logical_name(name: str, expert_of_slot: dict[int, list[int]]) -> str:
    """`name` with the logical expert in the slot's place; other names come back as they are.

    expert_of_slot: by global layer number, `[slot]`. MTP experts keep their numbers.
    """
    match = _EXPERT.fullmatch(name)
    if match is None or int(match["layer"]) not in expert_of_slot:
        return name
    return f"{match['head']}{expert_of_slot[int(match['layer'])][int(match['slot'])]}"


class ExpertNames:
    """Replaces slime's naming function in this process by one that speaks logical experts."""

    def __init__(self, common: Any):
        """common: the module slime.backends.megatron_utils.update_weight.common."""
        self.slot_named: Callable[..., Named] = common._named_params_and_buffers_global
        self.expert_of_slot: dict[int, list[int]] = {}
        self._logical = True
        common._named_params_and_buffers_global = self._named

    def follow(self, placement: Placement, layer_numbers: tuple[int, ...]) -> None:
        """Use `placement`, which covers the whole model's MoE layers in this order."""
        rows = placement.expert_of_slot.tolist()
        self.expert_of_slot = dict(zip(layer_numbers, rows, strict=True))

    def translate(self, name: str) -> str:
        """The logical name of a slot name, under the current placement."""
        return logical_name(name, self.expert_of_slot)

    @contextmanager
    def by_slot(self) -> Iterator[None]:
        """Slot names inside this block (host copies)."""
        self._logical = False
        try:
            yield
        finally:
            self._logical = True

    def _named(self, args: Any, model: Any) -> Named:
        for name, tensor in self.slot_named(args, model):
            yield (self.translate(name) if self._logical else name), tensor
