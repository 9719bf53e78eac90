"""slime's host copies of weights follow the experts: keyed by slot, permuted with the layout.

`TensorBackuper` (slime/utils/tensor_backper.py) keeps CPU copies of the tags actor, ref, old_actor,
rollout_actor and teacher by parameter name. Under slot names a move exchanges the values of equal
names between ranks, in place: the copies stay as large as they were, and no tag is loaded into the
model for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from planner.placement import Placement
from train_hooks.expert_state import ExpertState
from train_hooks.pieces import Piece, moves_between, parameter_pieces


def names_of_experts(
    named: Sequence[tuple[str, torch.Tensor]], state: ExpertState
) -> dict[int, str]:
    """Slot name by `id(parameter)` of every local expert matrix.

    named: what slime's naming function yields under slot names. Raises ValueError when a matrix
    has no name, which means that slime names experts in a way this version does not know.
    """
    name_of = {id(tensor): name for name, tensor in named}
    wanted = [p for experts in state.parameters.values() for params in experts for p in params]
    nameless = [p for p in wanted if id(p) not in name_of]
    if nameless:
        raise ValueError(
            f"{len(nameless)} of {len(wanted)} expert matrices have no name in slime's "
            "_named_params_and_buffers_global; RoutePack moves weight{i} of TEGroupedMLP only"
        )
    return {id(p): name_of[id(p)] for p in wanted}


@torch.no_grad()
def move_host_copies(
    copies: Mapping[str, Mapping[str, torch.Tensor]],
    names: Mapping[int, str],
    state: ExpertState,
    layer_numbers: Sequence[int],
    old: Placement,
    new: Placement,
) -> int:
    """Exchange the moved experts of every tag; returns the bytes that left this rank.

    copies: tag -> name -> CPU tensor. old, new: placements of this stage's layers, in the order of
    `layer_numbers`. Collective over `ExpertState.group`: every rank enters every exchange,
    with zero sizes if it has nothing to send, in the same order of tags. A layer is exchanged
    whole, so that every source is read before any target of it is written.
    """
    sent = 0
    for tag in sorted(copies):
        for number, before, after in zip(layer_numbers, old.expert_of_slot, new.expert_of_slot):
            moves = moves_between(before, after)
            if pieces := list(parameter_pieces(state, number, moves)):
                sent += _exchange(copies[tag], names, state, pieces)
    return sent


def _exchange(
    copy: Mapping[str, torch.Tensor],
    names: Mapping[int, str],
    state: ExpertState,
    pieces: Sequence[Piece],
) -> int:
    """One all-to-all of `pieces` between the host copies, through device buffers."""
    me, world = state.group.rank(), state.group.size()
    outgoing: list[list[torch.Tensor]] = [[] for _ in range(world)]
    incoming: list[list[torch.Tensor]] = [[] for _ in range(world)]
    for piece in pieces:
        if piece.source == me:
            outgoing[piece.target].append(copy[names[id(piece.source_param)]].view(-1))
        if piece.target == me:
            incoming[piece.source].append(copy[names[id(piece.target_param)]].view(-1))
    reference = pieces[0].source_param.data
    flat = [view for views in outgoing for view in views]
    send = torch.cat(flat).to(reference.device) if flat else reference.new_empty(0)
    send_sizes = [sum(view.numel() for view in views) for views in outgoing]
    receive_sizes = [sum(view.numel() for view in views) for views in incoming]
    received = send.new_empty(sum(receive_sizes))
    dist.all_to_all_single(received, send, receive_sizes, send_sizes, group=state.group)
    targets = [view for views in incoming for view in views]
    for target, part in zip(targets, received.split([t.numel() for t in targets])):
        target.copy_(part)
    return (sum(send_sizes) - send_sizes[me]) * send.element_size()
