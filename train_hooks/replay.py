"""Routing replay: force each router to the experts that rollout used (R3, Section 2.1).

Ids are set per router object and chosen by a forward pre-hook, so that every forward of one
micro-batch sees the same ids: also a recomputed one, and with several micro-batches in flight
(1F1B). A recomputed forward is told apart by its gradient mode: the first pass of a checkpointed
region runs without gradients, the recomputation with, in the order of the first passes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router_replay import RouterReplayAction

from train_hooks.router_seam import RouterSeam


class ReplayError(ValueError):
    """Captured expert ids do not fit the forward they are meant for."""


def check_ids(ids: torch.Tensor, num_layers: int, num_tokens: int, num_experts: int, top_k: int):
    """Raise ReplayError unless `ids` is `[layer, token, top_k]` with distinct ids in range.

    Megatron checks none of this: repeated ids, a missing row and a wrong range run silently.
    """
    expected = (num_layers, num_tokens, top_k)
    if tuple(ids.shape) != expected:
        raise ReplayError(
            f"replay ids have shape {tuple(ids.shape)}, expected {expected} [layer, token, top_k]: "
            "row i of a capture belongs to position i, the last position has none"
        )
    if ids.numel() == 0:
        return
    ordered = ids.sort(dim=-1).values
    low, high = int(ordered[..., 0].min()), int(ordered[..., -1].max())
    if low < 0 or high >= num_experts:
        raise ReplayError(f"replay ids span {low}..{high}, expected ids in [0, {num_experts})")
    if bool((ordered[..., 1:] == ordered[..., :-1]).any()):
        raise ReplayError("replay ids repeat an expert within one token's top-k")


def counts_of(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return int64 `[layer, expert]`: tokens of `ids` `[layer, token, top_k]` by expert."""
    flat = ids.flatten(1)
    counts = torch.zeros(ids.size(0), num_experts, dtype=torch.int64, device=ids.device)
    return counts.scatter_add_(1, flat, torch.ones_like(flat))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Choice:
    """What one router does in one micro-batch; ids None lets it choose freely."""

    row: int
    ids: torch.Tensor | None
    counts: torch.Tensor | None


@dataclass(kw_only=True, slots=True)
class _RouterQueue:
    """The choice in force of one router, and those whose recomputation is still to come."""

    router: torch.nn.Module
    seam: RouterSeam
    current: _Choice | None = None
    in_flight: deque[_Choice] = field(default_factory=deque)
    active: bool = False
    backward_follows: bool = False

    def choose(self, router, args) -> None:
        """Forward pre-hook: put this forward's ids into the router and its counts into the seam."""
        if not self.active or self.current is None:
            return
        choice = self.current
        if torch.is_grad_enabled():
            choice = self.in_flight.popleft() if self.in_flight else choice
        elif self.backward_follows:
            self.in_flight.append(choice)
        replay = router.router_replay
        replay.clear_indices()
        replay.clear_router_replay_action()
        if choice.ids is not None:
            replay.set_target_indices(choice.ids)
            replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        self.seam.expect(choice.row, choice.counts)


class RoutingReplay:
    """Replay for all routers of one pipeline stage; inert outside `begin` and `end`."""

    def __init__(self, layers: Mapping[int, MoELayer], seams: Mapping[int, RouterSeam]):
        self.queues = {
            number: _RouterQueue(router=layer.router, seam=seams[number])
            for number, layer in layers.items()
        }
        for queue in self.queues.values():
            queue.router.register_forward_pre_hook(queue.choose)

    def begin(self, *, backward_follows: bool) -> None:
        """Start an optimizer step, or a forward-only pass.

        Raises ReplayError for fused routing, which ignores replay, and for a model built without.
        """
        for queue in self.queues.values():
            if getattr(queue.router.config, "moe_router_fusion", False):
                raise ReplayError("moe_router_fusion ignores replayed ids: set it to False")
            if queue.router.router_replay is None:
                raise ReplayError(
                    "routing replay is off in this model: set moe_enable_routing_replay=True"
                )
            queue.active, queue.backward_follows = True, backward_follows
            queue.in_flight.clear()

    def use(
        self,
        row: int,
        ids: Mapping[int, torch.Tensor] | None,
        counts: Mapping[int, torch.Tensor] | None,
    ) -> None:
        """Set what the next forward replays: by global layer number, ids `[token, top_k]`.

        counts: int64 `[expert]` that the forward must execute; None compares nothing.
        """
        for number, queue in self.queues.items():
            queue.current = _Choice(
                row=row,
                ids=None if ids is None else ids[number],
                counts=None if counts is None else counts[number],
            )

    def end(self) -> None:
        """End the step; raises RuntimeError if a forward was never recomputed."""
        left = {number: len(q.in_flight) for number, q in self.queues.items() if q.in_flight}
        for queue in self.queues.values():
            queue.active, queue.current = False, None
            queue.in_flight.clear()
            queue.seam.expect(0, None)
            queue.router.router_replay.clear_indices()
            queue.router.router_replay.clear_router_replay_action()
        if left:
            raise RuntimeError(f"forwards without their backward, by MoE layer: {left}")
