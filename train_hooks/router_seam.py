"""The seam between logical routing and physical slots: a forward hook on each router."""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer


class RouterSeam:
    """Permute a router's output from logical experts to physical slots.

    Everything before the hook stays logical (scores, expert bias, groups, replay, statistics);
    everything after it is physical (dispatcher counts and splits). `expert_of_slot` is a buffer
    updated in place, so recomputed forwards and captured graphs see the current layout.

    Source: the hook point is `MoELayer.route` (megatron/core/transformer/moe/moe_layer.py).
    """

    def __init__(self, layer: MoELayer):
        router = layer.router
        device = next(router.parameters()).device
        slots = torch.arange(layer.config.num_moe_experts, device=device)
        router.register_buffer("routepack_expert_of_slot", slots, persistent=False)
        self.router = router
        self.sealed_because: str | None = None
        self.expected_row = 0
        self.expected_counts: torch.Tensor | None = None
        self.mismatches: list[tuple[int, torch.Tensor]] = []
        self.received_counts: list[torch.Tensor] | None = None
        router.register_forward_hook(self._translate)

    @property
    def expert_of_slot(self) -> torch.Tensor:
        """Int64 `[slot]`: the logical expert of each physical slot."""
        return self.router.routepack_expert_of_slot

    def expect(self, row: int, counts: torch.Tensor | None) -> None:
        """Compare the logical counts `[expert]` of the next forward, of `row`, with `counts`."""
        self.expected_row, self.expected_counts = row, counts

    def take_mismatches(self) -> list[tuple[int, int]]:
        """Return (row, experts whose count differed) of every forward compared since the last call.

        The device is waited for once, here.
        """
        taken = [(row, int(wrong)) for row, wrong in self.mismatches]
        self.mismatches.clear()
        return taken

    def _translate(self, router, args, output):
        if self.sealed_because is not None:
            raise RuntimeError(f"forward refused: {self.sealed_because}")
        probs, routing_map = output
        if self.expected_counts is not None:
            wrong = (routing_map.sum(dim=0) != self.expected_counts).sum()
            self.mismatches.append((self.expected_row, wrong))
        probs = probs.index_select(1, self.expert_of_slot)
        routing_map = routing_map.index_select(1, self.expert_of_slot)
        if self.received_counts is not None:
            self.received_counts.append(routing_map.sum(dim=0))
        return probs, routing_map
