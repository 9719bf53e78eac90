"""Before anything moves: every rank holds the same fitting plan, or all of them refuse it."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist

from planner.placement import Placement
from train_hooks.layout import ExpertLayout, LayoutError


def agree(
    placement: Placement,
    digest: str,
    window_id: int,
    layout: ExpertLayout,
    base_version: int,
    group: dist.ProcessGroup,
) -> None:
    """Raise LayoutError on every rank unless all hold the same fitting plan for this layout."""
    misfit = layout.misfit(placement)
    held = hashlib.sha256(placement.expert_of_slot.tobytes()).hexdigest()[:12]
    mine = (digest, held, window_id, base_version, layout.version, misfit)
    if not _all_hold(repr(mine), layout.device, group):
        everyone: list = [None] * group.size()
        dist.all_gather_object(everyone, mine, group=group)
        lines = [f"rank {rank}: {entry}" for rank, entry in enumerate(everyone)]
        raise LayoutError(
            "ranks hold different plans (digest, placement, window, plan's base version, layout "
            "version, misfit); nothing was moved. " + "; ".join(lines)
        )
    if misfit is not None:
        raise LayoutError(f"{misfit}; nothing was moved")
    if base_version != layout.version:
        raise LayoutError(
            f"stale plan: it starts from layout version {base_version}, the layout is at version "
            f"{layout.version}; nothing was moved. Plan from the last emitted placement"
        )


def agree_ready(
    failure: str | None, what: str, device: torch.device, group: dist.ProcessGroup
) -> None:
    """Raise LayoutError on every rank if any rank could not prepare; failure is what it said."""
    if _all_hold(repr(failure), device, group) and failure is None:
        return
    everyone: list = [None] * group.size()
    dist.all_gather_object(everyone, failure, group=group)
    said = [f"rank {rank}: {text}" for rank, text in enumerate(everyone) if text is not None]
    raise LayoutError(
        f"{what} could not be prepared; nothing was moved and the old layout goes on. "
        + "; ".join(said[:4])
    )


def _all_hold(text: str, device: torch.device, group: dist.ProcessGroup) -> bool:
    """Whether every rank holds the same text; one small collective, alike on every rank."""
    fingerprint = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
    mine = torch.tensor([fingerprint], dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=group)
    return all(torch.equal(other, mine) for other in everyone)
