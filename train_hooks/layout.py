"""The expert layout: the one object of the training side that holds a permutation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from planner.placement import Placement
from train_hooks.moe_layers import moe_layers
from train_hooks.replay import RoutingReplay
from train_hooks.router_seam import RouterSeam


class LayoutError(RuntimeError):
    """The expert layout cannot be trusted or does not fit; training must not go on."""


class ExpertLayout:
    """Which logical expert sits in which physical slot of every MoE layer of this stage.

    Slot s of a layer is local expert `s % (E/P)` of EP rank `s // (E/P)`. Everything outside this
    object speaks logical expert ids; `RouterSeam` translates the router's output (Section 3.2).
    """

    def __init__(self, model_chunks: Sequence[nn.Module]):
        self.layers = moe_layers(model_chunks)
        if not self.layers:
            raise LayoutError(
                "this pipeline stage has no MoE layer: got a dense model or an empty stage; "
                "start RoutePack only on stages with moe_layer_freq > 0"
            )
        any_layer = next(iter(self.layers.values()))
        self.num_experts: int = any_layer.config.num_moe_experts
        self.num_ep_ranks: int = self.num_experts // any_layer.num_local_experts
        self.version = 0
        self.seams = {number: RouterSeam(layer) for number, layer in self.layers.items()}
        self.replay = RoutingReplay(self.layers, self.seams)
        self._seal_all(None)

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """Global numbers of the MoE layers of this stage, in order."""
        return tuple(self.layers)

    def expert_of_slot(self, layer_number: int) -> np.ndarray:
        """Return int64 `[slot]`: the logical expert of every slot of one layer."""
        return self.seams[layer_number].expert_of_slot.cpu().numpy().copy()

    def logical_expert(self, layer_number: int, ep_rank: int, local_index: int) -> int:
        """Return the logical id of local expert `local_index` on `ep_rank`."""
        per_rank = self.num_experts // self.num_ep_ranks
        return int(self.seams[layer_number].expert_of_slot[ep_rank * per_rank + local_index])

    def placement(self) -> Placement:
        """Return the layout as the planner's placement, over this stage's layers."""
        return Placement(
            expert_of_slot=np.stack([self.expert_of_slot(n) for n in self.layers]).astype(np.int32),
            num_ep_ranks=self.num_ep_ranks,
            version=self.version,
        )

    def misfit(self, placement: Placement) -> str | None:
        """Say how `placement` differs from this model's layers, experts and EP ranks, or None."""
        got = (*placement.expert_of_slot.shape, placement.num_ep_ranks)
        expected = (len(self.layers), self.num_experts, self.num_ep_ranks)
        if got == expected:
            return None
        return (
            f"placement has (layers, experts, EP ranks) {got}, the model has {expected}: plan with "
            "the topology of the running job"
        )

    def begin_change(self, reason: str) -> None:
        """Refuse every forward until `finish_change`: state is about to move."""
        self._seal_all(reason)

    def finish_change(self, placement: Placement) -> None:
        """Take over `placement` after its state has arrived, and allow forwards again."""
        for number, row in zip(self.layers, placement.expert_of_slot):
            buffer = self.seams[number].expert_of_slot
            buffer.copy_(torch.from_numpy(row.astype(np.int64)))
        self.version = placement.version
        self._seal_all(None)

    def _seal_all(self, reason: str | None) -> None:
        for seam in self.seams.values():
            seam.sealed_because = reason
