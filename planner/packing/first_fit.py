"""Packing whole trajectories into cells of capacity C, and the lower bounds on their number.

A trajectory longer than C gets a cell of its own: the only cells allowed above the cap. All
functions take length [trajectory] in tokens and work on the trajectory's index.
"""

from __future__ import annotations

import numba
import numpy as np


def longest_first(length: np.ndarray) -> np.ndarray:
    """Trajectory indices by decreasing length, ties in arrival order."""
    return np.argsort(-np.asarray(length, np.int64), kind="stable")


@numba.njit(cache=True, nogil=True)
def _pack(length, order, capacity, best_fit, cell):
    load = np.zeros(len(order), np.int64)
    num_cells = 0
    for i in order:
        chosen = -1
        for k in range(num_cells):
            if load[k] + length[i] <= capacity:
                if not best_fit:
                    chosen = k
                    break
                if chosen < 0 or load[k] > load[chosen]:
                    chosen = k
        if chosen < 0:
            chosen = num_cells
            num_cells += 1
        load[chosen] += length[i]
        cell[i] = chosen
    return num_cells


def first_fit(length: np.ndarray, order: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """(cell [trajectory], number of cells): each trajectory, in order, into the first that fits."""
    cell = np.full(len(length), -1, np.int64)
    return cell, _pack(np.asarray(length, np.int64), order, capacity, False, cell)


def first_fit_decreasing(length: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """FFD: `first_fit` in order of decreasing length (Section 4.1)."""
    return first_fit(length, longest_first(length), capacity)


def best_fit_decreasing(length: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """BFD: by decreasing length, each into the fullest cell that fits."""
    cell = np.full(len(length), -1, np.int64)
    return cell, _pack(np.asarray(length, np.int64), longest_first(length), capacity, True, cell)


def split_to_count(
    cell: np.ndarray, num_cells: int, target: int, length: np.ndarray
) -> np.ndarray | None:
    """Cells raised to `target` by splitting the smallest item off the most populated cell.

    Returns cell [trajectory], or None when there are fewer trajectories than `target` cells. Ties
    go to the lowest cell and the earliest trajectory.
    """
    if len(cell) < target:
        return None
    cell = cell.copy()
    count = np.bincount(cell, minlength=target)
    for new in range(num_cells, target):
        source = int(np.argmax(count))
        members = np.flatnonzero(cell == source)
        cell[members[np.argmin(length[members])]] = new
        count[source] -= 1
        count[new] += 1
    return cell


def cells_lower_bound(length: np.ndarray, capacity: int) -> int:
    """Martello-Toth L2 lower bound on the number of cells.

    For a threshold k, trajectories above C - k need a cell alone, those above C/2 a cell each, and
    the middle ones (k .. C/2) overflow what the latter leave; the bound is the largest over k.
    Over-long trajectories count one cell each. Contains the capacity bound ceil(sum t / C) as k =
    0.
    """
    length = np.asarray(length, np.int64)
    over = int((length > capacity).sum())
    items = np.sort(length[length <= capacity])
    if len(items) == 0:
        return over
    total = np.concatenate([[0], np.cumsum(items)])
    half = int(np.searchsorted(items, capacity // 2, side="right"))
    best = 0
    for k in np.unique(np.concatenate([[0], items[:half]])):
        first_alone = int(np.searchsorted(items, capacity - k, side="right"))
        first_middle = int(np.searchsorted(items, k, side="left"))
        first_alone = max(first_alone, half)
        paired = first_alone - half
        room = paired * capacity - int(total[first_alone] - total[half])
        middle = int(total[half] - total[first_middle])
        extra = max(0, -(-(middle - room) // capacity))
        best = max(best, len(items) - half + extra)
    return over + best
