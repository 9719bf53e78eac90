"""Random numbers for the kernels: xorshift64*, one state per chain."""

from __future__ import annotations

import numba
import numpy as np


@numba.njit(cache=True, nogil=True, inline="always")
def next_random(state):
    """32 random bits of xorshift64*; state [1] uint64 is advanced."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return (x * np.uint64(2685821657736338717)) >> np.uint64(32)


@numba.njit(cache=True, nogil=True, inline="always")
def random_below(state, n):
    return np.int64((next_random(state) * np.uint64(n)) >> np.uint64(32))


@numba.njit(cache=True, nogil=True, inline="always")
def random_unit(state):
    return (np.float64(next_random(state)) + 0.5) * (1.0 / 4294967296.0)


def random_state(seed: int, chain: int) -> np.ndarray:
    """[1] uint64, never zero, for one chain of a search."""
    return np.random.SeedSequence([seed, chain]).generate_state(1, np.uint64) | np.uint64(1)
