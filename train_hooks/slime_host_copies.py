"""slime's host copies of weights follow the experts: keyed by slot, permuted with the layout.

`TensorBackuper` (slime/utils/tensor_backper.py) keeps CPU copies of the tags actor, ref, old_actor,
rollout_actor and teacher by parameter name. Under slot names a move exchanges the values of equal
names between ranks, in place: the copies stay as large as they were, and no tag is loaded into the
model for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from planner.placement import Placement
from train_hooks.expert_state import ExpertState
from train_hooks.pieces import Piece, moves_between, parameter_pieces
from train_hooks.transport import Carried, Staging, View, chunks_of


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
    staging: Staging,
) -> int:
    """Exchange the moved experts of every tag; returns the bytes that left this rank.

    copies: tag -> name -> CPU tensor. old, new: placements of this stage's layers, in the order of
    `layer_numbers`. staging: buffers that the pieces go through, those of the commit. Collective
    over `ExpertState.group`: every rank enters every chunk, in the same order of tags.
    """
    steps = zip(layer_numbers, old.expert_of_slot, new.expert_of_slot)
    moves = [(number, moves_between(before, after)) for number, before, after in steps]
    pieces = [(number, list(parameter_pieces(state, number, m))) for number, m in moves if m]
    if not pieces:
        return 0
    dtype = pieces[0][1][0].source_param.dtype
    sent = 0
    for tag in sorted(copies):
        view = _view_of(copies[tag], names)
        for chunk in chunks_of(pieces, staging.chunk_bytes, dtype.itemsize):
            carried = Carried(chunk, view, state.group, staging, dtype)
            carried.finish()
            sent += carried.bytes_sent
    return sent


def _view_of(copy: Mapping[str, torch.Tensor], names: Mapping[int, str]) -> View:
    def view(piece: Piece, is_source: bool) -> torch.Tensor:
        param = piece.source_param if is_source else piece.target_param
        start = piece.source_start if is_source else piece.target_start
        return copy[names[id(param)]].view(-1)[start : start + piece.num_elements]

    return view
