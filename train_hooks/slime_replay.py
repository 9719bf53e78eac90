"""Routing that is widened to int32 only while a micro-batch is read (slime#2384).

slime pads routes with `torch.arange(..., dtype=experts.dtype) % num_experts`
(backends/megatron_utils/cp_utils.py), which is wrong in uint8, so a train actor must hand out
int32; widening a whole rank's rollout at once would cost four times its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class WidenedOnRead(list):
    """A list of narrow routing tensors `[row, layer, top_k]`; reading an item gives int32."""

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if isinstance(index, slice):
            return WidenedOnRead(found)
        return torch.as_tensor(found).to(torch.int32)

    def __iter__(self):
        return (self[i] for i in range(len(self)))


def own_routing(refs: Sequence[Any], partition: Sequence[int], fetch: Any) -> WidenedOnRead:
    """This rank's routing: `refs` are one object per trajectory, `fetch` reads a list of them."""
    return WidenedOnRead(fetch([refs[i] for i in partition]))
