"""The pieces of state that a new placement moves, enumerated alike on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from torch import nn

from train_hooks.expert_state import ExpertState


class Piece(NamedTuple):
    """One contiguous range of one expert matrix on its way from a rank to a rank.

    `source` and `target` are ranks of `ExpertState.group`; starts and `num_elements` count
    elements of the flat parameter; `expert` is the logical id; `matrix` counts the matrices of an
    expert; `key` is None for the model parameter, else an optimizer key.
    """

    source: int
    target: int
    source_param: nn.Parameter
    source_start: int
    target_param: nn.Parameter
    target_start: int
    num_elements: int
    expert: int
    matrix: int
    key: str | None


class Move(NamedTuple):
    """One logical expert on its way from a slot to a slot of its layer."""

    expert: int
    from_slot: int
    to_slot: int


def moves_between(old: np.ndarray, new: np.ndarray) -> list[Move]:
    """Return the move of every expert that changes its slot.

    `old` and `new` are `[slot]` logical experts of one layer.
    """
    slot_of_expert = np.argsort(old)
    return [
        Move(int(expert), int(slot_of_expert[expert]), slot)
        for slot, expert in enumerate(new)
        if slot_of_expert[expert] != slot
    ]


def parameter_pieces(
    state: ExpertState, layer_number: int, moves: Sequence[Move]
) -> Iterator[Piece]:
    """Yield the model-parameter pieces of one layer: every EDP replica moves its own copy."""
    matrices = state.parameters[layer_number]
    per_rank = len(matrices)
    for expert, from_slot, to_slot in moves:
        pairs = zip(matrices[from_slot % per_rank], matrices[to_slot % per_rank])
        for matrix, (source_param, target_param) in enumerate(pairs):
            for edp in range(state.num_edp_ranks):
                yield Piece(
                    source=state.rank_in_group[from_slot // per_rank, edp],
                    target=state.rank_in_group[to_slot // per_rank, edp],
                    source_param=source_param,
                    source_start=0,
                    target_param=target_param,
                    target_start=0,
                    num_elements=source_param.numel(),
                    expert=expert,
                    matrix=matrix,
                    key=None,
                )


def optimizer_pieces(
    state: ExpertState,
    layer_number: int,
    moves: Sequence[Move],
    keys: Sequence[str],
) -> Iterator[Piece]:
    """Yield the pieces of one layer for the optimizer tensors `keys`.

    Two slots with different local indices have different EDP owners, and a shard edge can cut
    through one matrix, so a piece is the overlap of a source owner's and a target owner's range.
    """
    matrices = state.parameters[layer_number]
    per_rank = len(matrices)
    for expert, from_slot, to_slot in moves:
        pairs = zip(matrices[from_slot % per_rank], matrices[to_slot % per_rank])
        for matrix, (source_param, target_param) in enumerate(pairs):
            for source_edp, source_low, source_high in state.owners(source_param):
                for target_edp, target_low, target_high in state.owners(target_param):
                    low, high = max(source_low, target_low), min(source_high, target_high)
                    if low >= high:
                        continue
                    for key in keys:
                        yield Piece(
                            source=state.rank_in_group[from_slot // per_rank, source_edp],
                            target=state.rank_in_group[to_slot // per_rank, target_edp],
                            source_param=source_param,
                            source_start=low,
                            target_param=target_param,
                            target_start=low,
                            num_elements=high - low,
                            expert=expert,
                            matrix=matrix,
                            key=key,
                        )
