"""Commit a placement: move expert state between ranks, exactly, at a training-step boundary.

Protocol (Section 3.2, Figure 6): agree on the plan, wait for pending parameter gathers, then per
layer send only what moves, receive the layer whole, write it into the existing slots. Parameter
objects, shapes, gradient buffers and communicators stay as they are. From the first byte until the
last write every forward is refused, so a commit that fails can not be trained on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from planner.placement import Placement
from train_hooks.expert_state import ExpertState
from train_hooks.layout import ExpertLayout, LayoutError
from train_hooks.pieces import Piece, moved_slots, optimizer_pieces, parameter_pieces


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitReport:
    """What one commit did on this rank: experts moved, bytes sent to others, seconds, version."""

    num_moved: int
    bytes_sent: int
    seconds: float
    version: int


def agree(
    digest: str, window_id: int, layout: ExpertLayout, base_version: int, group: dist.ProcessGroup
) -> None:
    """Raise LayoutError on every rank unless all hold the same plan for the current layout."""
    mine = (digest, window_id, base_version, layout.version)
    everyone: list = [None] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    if any(other != everyone[0] for other in everyone):
        lines = [f"rank {rank}: {entry}" for rank, entry in enumerate(everyone)]
        raise LayoutError(
            "ranks hold different plans (digest, window, plan's base version, layout version); "
            "nothing was moved. " + "; ".join(lines)
        )
    if base_version != layout.version:
        raise LayoutError(
            f"stale plan: it starts from layout version {base_version}, the layout is at version "
            f"{layout.version}; nothing was moved. Plan from the last emitted placement"
        )


@torch.no_grad()
def commit(
    layout: ExpertLayout,
    state: ExpertState,
    placement: Placement,
    *,
    base_version: int,
    window_id: int,
    digest: str,
) -> CommitReport:
    """Move parameters, fp32 main shards and Adam moments so that `layout` becomes `placement`.

    Collective over `ExpertState.group`; call between `optimizer.step()` and the next forward.
    Raises LayoutError on all ranks, before anything moves, for a plan that differs between ranks,
    is stale, or does not fit. An error after that leaves the layout refusing every forward.
    """
    start = time.perf_counter()
    layout.check_fits(placement)
    agree(digest, window_id, layout, base_version, state.group)
    state.wait_for_parameters()
    num_moved = bytes_sent = 0
    layout.begin_change(f"the commit of window {window_id} did not finish")
    for number, new in zip(layout.layer_numbers, placement.expert_of_slot):
        moves = moved_slots(layout.expert_of_slot(number), new)
        num_moved += len(moves)
        if not moves:
            continue
        try:
            bytes_sent += _transport(state, list(parameter_pieces(state, number, moves)))
            bytes_sent += _transport(state, list(optimizer_pieces(state, number, moves)))
        except Exception as error:
            experts = sorted({int(new[slot]) for _, slot in moves})
            raise LayoutError(
                f"commit of window {window_id} failed in MoE layer {number} (experts {experts}): "
                f"{error}. Expert state may be incomplete; restart from the last checkpoint"
            ) from error
    layout.finish_change(placement)
    return CommitReport(
        num_moved=num_moved,
        bytes_sent=bytes_sent,
        seconds=time.perf_counter() - start,
        version=placement.version,
    )


def _transport(state: ExpertState, pieces: Sequence[Piece]) -> int:
    """Exchange `pieces` with one all-to-all per dtype and write them; return bytes sent away."""
    me, world = state.group.rank(), state.group.size()
    outgoing: list[list[torch.Tensor]] = [[] for _ in range(world)]
    incoming: list[list[torch.Tensor]] = [[] for _ in range(world)]
    for piece in pieces:
        if piece.source == me:
            source = _view(state, piece.source_param, piece.source_start, piece)
            outgoing[piece.target].append(source)
        if piece.target == me:
            target = _view(state, piece.target_param, piece.target_start, piece)
            incoming[piece.source].append(target)
    if not pieces:
        return 0
    reference = _reference_tensor(state, pieces[0])
    send = _concatenate([view for views in outgoing for view in views], reference)
    send_sizes = [sum(view.numel() for view in views) for views in outgoing]
    receive_sizes = [sum(view.numel() for view in views) for views in incoming]
    received = reference.new_empty(sum(receive_sizes))
    dist.all_to_all_single(received, send, receive_sizes, send_sizes, group=state.group)
    targets = [view for views in incoming for view in views]
    if targets:
        chunks = received.split([view.numel() for view in targets])
        torch._foreach_copy_(targets, list(chunks))
    return (sum(send_sizes) - send_sizes[me]) * send.element_size()


def _view(state: ExpertState, param, start: int, piece: Piece) -> torch.Tensor:
    stop = start + piece.num_elements
    if piece.key is None:
        return param.data.view(-1)[start:stop]
    offset, flat = state.optimizer_shard(param, piece.key)
    return flat[start - offset : stop - offset]


def _reference_tensor(state: ExpertState, piece: Piece) -> torch.Tensor:
    if piece.key is None:
        return piece.source_param.data
    return torch.empty(0, dtype=torch.float32, device=piece.source_param.device)


def _concatenate(views: list[torch.Tensor], reference: torch.Tensor) -> torch.Tensor:
    return torch.cat(views) if views else reference.new_empty(0)
