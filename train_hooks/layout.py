"""The expert layout: the one object of the training side that holds a permutation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from torch import nn

from planner.placement import Placement
from train_hooks.moe_layers import moe_layers, unwrap
from train_hooks.replay import RoutingReplay
from train_hooks.router_seam import RouterSeam


class LayoutError(RuntimeError):
    """The expert layout cannot be trusted or does not fit; training must not go on."""


class ExpertLayout:
    """Which logical expert sits in which physical slot of every MoE layer of this stage.

    Slot s of a layer is local expert `s % (E/P)` of EP rank `s // (E/P)`. Everything outside this
    object speaks logical expert ids; `RouterSeam` translates the router's output (Section 3.2).
    A pipeline stage of dense layers only holds a layout of no layers, and takes part in commits.
    Raises LayoutError for a model without experts.
    """

    def __init__(self, model_chunks: Sequence[nn.Module]):
        first = unwrap(model_chunks[0])
        if not first.config.num_moe_experts:
            raise LayoutError(
                "config.num_moe_experts is not set: RoutePack balances mixture-of-experts models; "
                "run a dense model with --routepack-policy off"
            )
        self.config = first.config
        self.layers = moe_layers(model_chunks)
        self.num_experts: int = first.config.num_moe_experts
        self.num_ep_ranks: int = mpu.get_expert_model_parallel_world_size()
        self.device: torch.device = next(first.parameters()).device
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
            expert_of_slot=np.array(
                [self.expert_of_slot(n) for n in self.layers], dtype=np.int32
            ).reshape(len(self.layers), self.num_experts),
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

    def begin_change(self, reason: str, restart_from: str = "the last checkpoint") -> None:
        """Refuse every forward until `finish_change`: state is about to move.

        A forward then says `reason` and what to restart from, whatever stopped the change: an
        error, an interrupt, or a kill of one rank that the others survive.
        """
        self._seal_all(f"{reason}. Expert state may be incomplete; restart from {restart_from}")

    def rows_of(self, placement: Placement) -> dict[int, torch.Tensor]:
        """Int64 `[slot]` of every layer on the device: what `finish_change` takes over."""
        return {
            number: torch.from_numpy(row.astype(np.int64)).to(self.device)
            for number, row in zip(self.layers, placement.expert_of_slot)
        }

    def finish_change(
        self, placement: Placement, rows: dict[int, torch.Tensor] | None = None
    ) -> None:
        """Take over `placement` after its state has arrived, and allow forwards again.

        rows: `rows_of(placement)`, made before the change began.
        """
        for number, row in (self.rows_of(placement) if rows is None else rows).items():
            self.seams[number].expert_of_slot.copy_(row)
        self.version = placement.version
        self._seal_all(None)

    def _seal_all(self, reason: str | None) -> None:
        for seam in self.seams.values():
            seam.sealed_because = reason
