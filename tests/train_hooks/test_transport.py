"""Chunks: bounded, closed, complete; checksums: order-independent, sensitive."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from train_hooks.checksums import _bits
from train_hooks.pieces import Piece, moves_between
from train_hooks.transport import chunks_of

NUM_RANKS, SLOTS_PER_RANK = 3, 4


def pieces_of(permutation: np.ndarray, num_elements: int) -> list[Piece]:
    old = np.arange(len(permutation))
    return [
        Piece(
            source=a // SLOTS_PER_RANK,
            target=b // SLOTS_PER_RANK,
            source_param=a,
            source_start=0,
            target_param=b,
            target_start=0,
            num_elements=num_elements,
            expert=e,
            matrix=0,
            key=None,
        )
        for e, a, b in moves_between(old, permutation)
    ]


@settings(deadline=None)
@given(st.permutations(range(12)), st.integers(1, 70), st.integers(1, 2000))
def test_chunks_carry_everything_once_and_stay_bounded(permutation, num_elements, limit):
    permutation = np.array(permutation)
    pieces = pieces_of(permutation, num_elements)
    chunks = list(chunks_of([(5, pieces)], limit, itemsize=4))
    state = {slot: np.full(num_elements, slot) for slot in range(12)}
    for chunk in chunks:
        sent, received = np.zeros(NUM_RANKS), np.zeros(NUM_RANKS)
        for p in chunk.pieces:
            sent[p.source] += 4 * p.num_elements
            received[p.target] += 4 * p.num_elements
        one_element = 4 * SLOTS_PER_RANK
        assert max(sent.max(), received.max()) <= max(limit, one_element)
        # Whole chunk read before any of it is written, chunk after chunk.
        read = [
            state[p.source_param][p.source_start : p.source_start + p.num_elements].copy()
            for p in chunk.pieces
        ]
        for p, values in zip(chunk.pieces, read):
            state[p.target_param][p.target_start : p.target_start + p.num_elements] = values
    for slot, expert in enumerate(permutation):
        assert (state[slot] == expert).all()


@given(st.permutations(range(12)), st.permutations(range(12)))
def test_moves_between_turn_the_old_layout_into_the_new(old, new):
    old, new = np.array(old), np.array(new)
    result = old.copy()
    for _, from_slot, to_slot in moves_between(old, new):
        assert from_slot != to_slot
        result[to_slot] = old[from_slot]
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
