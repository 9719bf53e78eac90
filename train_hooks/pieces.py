"""The pieces of state that a new placement moves, enumerated alike on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
from torch import nn

from train_hooks.expert_state import ExpertState, StateKind
from train_hooks.inventory import Slice

Half = Literal["whole", "parameters", "optimizer"]
"""What a move carries: everything, or the first or second half of a split commit."""


class Move(NamedTuple):
    """One logical expert on its way from a slot to a slot of its layer.

    Moves of a layer form cycles of slots; `place` counts along the cycle number `cycle`, which
    has `length` moves.
    """

    expert: int
    from_slot: int
    to_slot: int
    cycle: int
    place: int
    length: int

    def staged(self, unit: int) -> bool:
        """Whether the move's piece in unit `unit` goes through staging at its target.

        Every other move of a cycle does, first, so that the others arrive where they stay: their
        target was sent before. Odd units start one place on, so that ranks take turns.
        """
        return (self.place - (self.cycle + unit) % 2) % self.length % 2 == 0


class Piece(NamedTuple):
    """One contiguous range of what an expert owns, on its way from a rank to a rank.

    `source` and `target` are ranks of `ExpertState.group`. source_part and target_part are the
    slices of the two slots as this rank numbers them; `start` and `num_elements` count inside the
    expert's part. name: of the owned tensor. key: None for the tensor itself, `copy TAG` for a
    host copy, else an optimizer key; factor: of a whole shard. staged: see `Move.staged`.
    """

    source: int
    target: int
    source_part: Slice
    target_part: Slice
    start: int
    num_elements: int
    itemsize: int
    expert: int
    name: str
    key: str | None
    factor: bool
    staged: bool

    @property
    def num_bytes(self) -> int:
        """Bytes that the piece carries."""
        return self.num_elements * self.itemsize


COPY = "copy "
"""How keys of host copies start; their tag follows."""


def moves_between(old: np.ndarray, new: np.ndarray) -> list[Move]:
    """Return the move of every expert that changes its slot, cycle after cycle.

    `old` and `new` are `[slot]` logical experts of one layer.
    """
    slot_in_new = np.argsort(new)
    moves: list[Move] = []
    seen: set[int] = set()
    number = 0
    for start in range(len(old)):
        if start in seen or old[start] == new[start]:
            continue
        slots = [start]
        while (following := int(slot_in_new[old[slots[-1]]])) != start:
            slots.append(following)
        seen.update(slots)
        for place, slot in enumerate(slots):
            target = slots[(place + 1) % len(slots)]
            moves.append(Move(int(old[slot]), slot, target, number, place, len(slots)))
        number += 1
    return moves


def pieces_of_layer(
    state: ExpertState,
    layer_number: int,
    moves: Sequence[Move],
    kinds: dict[str, tuple[StateKind, ...]],
    half: Half = "whole",
    copies: Sequence[str] = (),
) -> Iterator[list[Piece]]:
    """Yield closed units of pieces: one kind of state of one owned name, for all moves.

    kinds: optimizer state by owned name. copies: tags of host copies that move too.
    """
    layer = state.inventory[layer_number]
    per_rank = len(layer.experts)
    number = 0
    for index, name in enumerate(layer.names):
        pairs = [
            (move, layer.experts[move.from_slot % per_rank][index],
             layer.experts[move.to_slot % per_rank][index])
            for move in moves
        ]  # fmt: skip
        if half != "optimizer":
            itemsize = layer.experts[0][index].tensor.element_size()
            for key in (None, *(COPY + tag for tag in copies)):
                if key is None or isinstance(layer.experts[0][index].tensor, nn.Parameter):
                    yield list(_replicas(state, per_rank, pairs, name, key, itemsize, number))
                    number += 1
        for kind in kinds.get(name, ()):
            if half == "whole" or (half == "parameters") == kind.with_parameter:
                yield list(_shards(state, per_rank, pairs, name, kind, number))
                number += 1


def _replicas(state, per_rank, pairs, name, key, itemsize, unit) -> Iterator[Piece]:
    """Pieces of what every EDP replica holds whole and moves for itself."""
    for move, source, target in pairs:
        for edp in range(state.num_edp_ranks):
            yield Piece(
                state.rank_in_group[move.from_slot // per_rank, edp],
                state.rank_in_group[move.to_slot // per_rank, edp],
                source, target, 0, source.num_elements, itemsize,
                move.expert, name, key, False, move.staged(unit),
            )  # fmt: skip


def _shards(state, per_rank, pairs, name, kind: StateKind, unit) -> Iterator[Piece]:
    """Pieces of the optimizer's shards.

    Two slots with different local indices have different EDP owners, and a shard edge can cut
    through one tensor, so a piece is the overlap of a source owner's and a target owner's range.
    """
    for move, source, target in pairs:
        for source_edp, source_low, source_high in state.owners(source):
            for target_edp, target_low, target_high in state.owners(target):
                low, high = max(source_low, target_low), min(source_high, target_high)
                if low >= high:
                    continue
                yield Piece(
                    state.rank_in_group[move.from_slot // per_rank, source_edp],
                    state.rank_in_group[move.to_slot // per_rank, target_edp],
                    source, target, 0 if kind.factor else low, 1 if kind.factor else high - low,
                    kind.itemsize, move.expert, name, kind.key, kind.factor, move.staged(unit),
                )  # fmt: skip
