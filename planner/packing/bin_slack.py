"""Minimum bin slack: fill one cell after another as full as a bounded search can.

Each cell is opened by the longest remaining trajectory and completed by the subset of at most
`most_added` remaining ones that leaves the least room. Closes the last cells that FFD leaves open
on windows of many short trajectories. A positive `jitter` lowers each cell's cap at random, for
restarts.
"""

from __future__ import annotations

import numba
import numpy as np

from planner.packing.first_fit import longest_first

# (most_added, steps a cell, largest jitter, restarts). More rounds closed no further window of
# synthetic:flash; what stays open needs column generation (seconds).
ROUNDS = ((2, 2_000, 0, 1), (3, 20_000, 0, 1), (3, 20_000, 8, 4))


@numba.njit(cache=True, nogil=True, inline="always")
def next_fitting(length, remaining, start, most):
    """First remaining item from `start` on with at most `most` tokens, or the number of items.

    remaining [item + 1] points from a taken item towards the next one that remains.
    """
    low, high = start, length.shape[0]
    while low < high:
        middle = (low + high) // 2
        if length[middle] > most:
            low = middle + 1
        else:
            high = middle
    while remaining[low] != low:
        remaining[low] = remaining[remaining[low]]
        low = remaining[low]
    return low


@numba.njit(cache=True, nogil=True)
def fill_cell(length, remaining, first, room, most_added, max_steps, picked, stack):
    """Depth-first search over the remaining items (falling length) from `first` on.

    Branches that cannot beat the fullest subset are cut: those too small even with `most_added`
    items of the next length, and those that open with a length already tried. Fills picked with the
    items of the fullest subset found; returns their number.
    """
    num = length.shape[0]
    depth = 0
    tokens = 0
    best = 0
    num_picked = 0
    item = next_fitting(length, remaining, first, room)
    for _ in range(max_steps):
        if item < num and tokens + (most_added - depth) * length[item] > best:
            stack[depth] = item
            depth += 1
            tokens += length[item]
            if tokens > best:
                best = tokens
                num_picked = depth
                for k in range(depth):
                    picked[k] = stack[k]
                if best == room:
                    break
            item = next_fitting(length, remaining, item + 1, room - tokens)
            continue
        if depth == 0:
            break
        depth -= 1
        item = stack[depth]
        tokens -= length[item]
        item = next_fitting(length, remaining, item + 1, length[item] - 1)
    return num_picked


@numba.njit(cache=True, nogil=True)
def pack_by_slack(length, capacity, most_added, max_steps, room_lost, cell):
    """Packs length [item], falling, into cells; room_lost [item]: tokens that the cell opened by an
    item forgoes. Fills cell [item]; returns the number of cells."""
    num = length.shape[0]
    remaining = np.arange(num + 1)
    picked = np.empty(most_added, np.int64)
    stack = np.empty(most_added, np.int64)
    cell[:] = -1
    num_cells = 0
    for head in range(num):
        if cell[head] >= 0:
            continue
        cell[head] = num_cells
        remaining[head] = head + 1
        room = capacity - length[head] - room_lost[head]
        if room > 0:
            taken = fill_cell(
                length, remaining, head + 1, room, most_added, max_steps, picked, stack
            )
            for k in range(taken):
                cell[picked[k]] = num_cells
                remaining[picked[k]] = picked[k] + 1
        num_cells += 1
    return num_cells


def pack_by_slack_reference(
    length: np.ndarray, capacity: int, most_added: int, room_lost: np.ndarray
) -> tuple[np.ndarray, int]:
    """Plain twin of `pack_by_slack` without a limit on steps."""
    cell = np.full(len(length), -1, np.int64)
    num_cells = 0
    for head in range(len(length)):
        if cell[head] >= 0:
            continue
        cell[head] = num_cells
        room = int(capacity - length[head] - room_lost[head])
        rest = [i for i in range(len(length)) if cell[i] < 0]
        best: tuple[int, list[int]] = (0, [])

        def extend(at: int, tokens: int, taken: list[int]) -> None:
            nonlocal best
            if tokens > best[0]:
                best = (tokens, taken)
            if len(taken) == most_added:
                return
            for k in range(at, len(rest)):  # noqa: B023 - called within this iteration
                if tokens + length[rest[k]] <= room:  # noqa: B023
                    extend(k + 1, tokens + int(length[rest[k]]), [*taken, rest[k]])  # noqa: B023

        extend(0, 0, [])
        cell[best[1]] = num_cells
        num_cells += 1
    return cell, num_cells


def minimum_bin_slack(
    length: np.ndarray, capacity: int, enough: int, seed: int = 0
) -> tuple[np.ndarray, int]:
    """(cell [trajectory], number of cells) of the best round; stops at `enough` cells or fewer."""
    order = longest_first(length)
    falling = np.asarray(length, np.int64)[order]
    rng = np.random.default_rng(seed)
    found = np.empty(len(length), np.int64)
    best, fewest = np.arange(len(length)), len(length)
    for most_added, max_steps, jitter, restarts in ROUNDS:
        for _ in range(restarts):
            lost = rng.integers(0, jitter + 1, len(length)) if jitter else np.zeros_like(falling)
            num_cells = pack_by_slack(falling, capacity, most_added, max_steps, lost, found)
            if num_cells < fewest:
                fewest = num_cells
                best = np.empty_like(found)
                best[order] = found
            if fewest <= enough:
                return best, fewest
    return best, fewest
