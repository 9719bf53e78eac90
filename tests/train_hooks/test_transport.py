"""Chunks: bounded, closed, complete, right in any order; checksums: sensitive."""

from __future__ import annotations

import random

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from train_hooks.checksums import _bits
from train_hooks.chunks import chunks_of
from train_hooks.inventory import Slice
from train_hooks.pieces import Piece, moves_between

NUM_RANKS, SLOTS_PER_RANK, ITEMSIZE = 3, 4, 4


def pieces_of(permutation: np.ndarray, slots: list[torch.Tensor], unit: int) -> list[Piece]:
    whole = [Slice(tensor, 0, tensor.shape) for tensor in slots]
    return [
        Piece(
            source=move.from_slot // SLOTS_PER_RANK,
            target=move.to_slot // SLOTS_PER_RANK,
            source_part=whole[move.from_slot],
            target_part=whole[move.to_slot],
            start=0,
            num_elements=whole[move.from_slot].num_elements,
            itemsize=ITEMSIZE,
            expert=move.expert,
            name="weight",
            key=None,
            factor=False,
            staged=move.staged(unit),
        )
        for move in moves_between(np.arange(len(permutation)), permutation)
    ]


def view(part: Slice, piece: Piece) -> torch.Tensor:
    return part.tensor[piece.start : piece.start + piece.num_elements]


@settings(deadline=None)
@given(
    st.permutations(range(12)),
    st.integers(1, 70),
    st.integers(1, 2000),
    st.integers(0, 1),
    st.randoms(use_true_random=False),
)
def test_chunks_carry_everything_once_in_any_order_and_stay_bounded(
    permutation, num_elements, limit, unit, order: random.Random
):
    slots = [torch.full((num_elements,), slot) for slot in range(12)]
    pieces = pieces_of(np.array(permutation), slots, unit)
    for chunk in chunks_of([(5, pieces)], limit):
        sent, received = np.zeros(NUM_RANKS), np.zeros(NUM_RANKS)
        for p in chunk.pieces:
            sent[p.source] += p.num_bytes
            received[p.target] += p.num_bytes
        one_element = ITEMSIZE * SLOTS_PER_RANK
        assert max(sent.max(), received.max()) <= max(limit, one_element)
        shuffled = order.sample(chunk.pieces, len(chunk.pieces))
        staged = [(p, view(p.source_part, p).clone()) for p in shuffled if p.staged]
        for p in shuffled:  # these arrive where they stay: nothing may still be read there
            if not p.staged:
                view(p.target_part, p).copy_(view(p.source_part, p))
        for p, values in staged:
            view(p.target_part, p).copy_(values)
    for slot, expert in enumerate(permutation):
        assert (slots[slot] == expert).all()


@given(st.permutations(range(12)), st.integers(0, 5))
def test_about_half_of_a_cycle_is_staged_and_never_less(permutation, unit):
    slots = [torch.zeros(1) for _ in range(12)]
    moves = moves_between(np.arange(12), np.array(permutation))
    staged = sum(p.staged for p in pieces_of(np.array(permutation), slots, unit))
    lengths = [move.length for move in moves if move.place == 0]
    assert staged == sum(-(-length // 2) for length in lengths)


@given(st.permutations(range(12)), st.permutations(range(12)))
def test_moves_between_turn_the_old_layout_into_the_new(old, new):
    old, new = np.array(old), np.array(new)
    result = old.copy()
    for move in moves_between(old, new):
        assert move.from_slot != move.to_slot and old[move.from_slot] == move.expert
        result[move.to_slot] = old[move.from_slot]
    np.testing.assert_array_equal(result, new)


@given(st.integers(1, 50), st.integers(0, 49), st.integers(0, 1000))
def test_checksums_add_over_shards_and_see_swaps_and_flips(size, cut, seed):
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    cut = min(cut, size)
    whole = _bits(values, 0)
    assert whole == _bits(values[:cut], 0) + _bits(values[cut:], cut)
    changed = values.clone()
    changed[0] = torch.nextafter(changed[0], torch.tensor(9.0))
    assert _bits(changed, 0) != whole
    if size > 1:
        assert _bits(values.flip(0), 0) != whole or torch.equal(values, values.flip(0))
