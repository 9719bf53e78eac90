"""Routing replay: force each router to the experts that rollout used (R3, Section 2.1)."""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.router_replay import RouterReplayAction

from train_hooks.layout import ExpertLayout


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


def set_replay(layout: ExpertLayout, ids: torch.Tensor | None, num_tokens: int) -> None:
    """Set the logical ids `[layer, token, top_k]` of the next forward, or clear with None.

    Set per router object: Megatron's class-wide list also holds the routers of other models in
    the process. The ids stay set through backward, so a recomputed forward replays the same ones.
    Raises ReplayError for ids that do not fit, and for fused routing, which ignores replay.
    """
    routers = [layer.router for layer in layout.layers.values()]
    config = routers[0].config
    if getattr(config, "moe_router_fusion", False):
        raise ReplayError("moe_router_fusion ignores replayed ids: set --no-moe-router-fusion")
    if routers[0].router_replay is None:
        raise ReplayError("routing replay is off in this model: set moe_enable_routing_replay=True")
    if ids is not None:
        ids = ids.long()
        check_ids(ids, len(routers), num_tokens, config.num_moe_experts, routers[0].topk)
    for index, router in enumerate(routers):
        router.router_replay.clear_indices()
        router.router_replay.clear_router_replay_action()
        if ids is not None:
            router.router_replay.set_target_indices(ids[index])
            router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
