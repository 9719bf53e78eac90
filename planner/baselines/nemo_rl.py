"""NeMo-RL's rows: modified first-fit decreasing over all trajectories, bins dealt round-robin.

Johnson and Garey's five phases: a bin for each item above C/2; from the fullest bin on, the largest
item of (C/3, C/2] that fits; backwards, into bins without one, the smallest and the largest fitting
item of (C/6, C/3]; forwards, whatever still fits, largest first; the rest, largest first, into the
least full of the bins opened for it, where NeMo-RL departs from FFD. The number of bins is raised
to a multiple of D by taking single items off the most populated bins; bin k goes to DP slot
k mod D.
Peer: NeMo-RL `nemo_rl/data/packing/algorithms.py` and `distributed/batched_data_dict.py`. NeMo-RL
refuses a trajectory longer than C, here it gets a bin of its own.
"""

from __future__ import annotations

from bisect import insort

import numpy as np
from numpy.typing import NDArray

from planner.packing.row_count import round_up
from planner.rows import Rows
from planner.topology import Topology


def nemo_rl_rows(length: NDArray[np.integer], topology: Topology) -> Rows | None:
    """Rows of length `[trajectory]`; None when there are fewer trajectories than cells."""
    num_slots = topology.num_dp_slots
    bins = modified_ffd(length, topology.capacity)
    target = round_up(max(len(bins), num_slots), num_slots * topology.row_multiple)
    if target > len(length):
        return None
    _raise_to(bins, target)
    cell = np.empty(len(length), np.int32)
    for k, members in enumerate(bins):
        cell[members] = k  # row k // D, DP slot k mod D
    return Rows(cell=cell, num_rows=target // num_slots, num_dp_slots=num_slots)


def modified_ffd(length: NDArray[np.integer], capacity: int) -> list[list[int]]:
    """Bins of trajectory indices, none above `capacity` but for a single longer trajectory.

    Raises ValueError for a length or capacity below 1.
    """
    size = [int(t) for t in length]
    if capacity < 1 or min(size, default=1) < 1:
        raise ValueError(f"length and capacity: expected at least 1, got {capacity} and {size[:8]}")
    falling = sorted(range(len(size)), key=lambda i: -size[i])
    large = [i for i in falling if 2 * size[i] > capacity]
    medium = [i for i in falling if 2 * size[i] <= capacity < 3 * size[i]]
    small = [i for i in reversed(falling) if 3 * size[i] <= capacity < 6 * size[i]]
    tiny = [i for i in falling if 6 * size[i] <= capacity]
    bins = [[i] for i in large]
    room = [capacity - size[i] for i in large]
    has_medium = [_take_first_that_fits(medium, k, bins, room, size) for k in range(len(bins))]
    for k in reversed(range(len(bins))):
        if has_medium[k] or len(small) < 2 or size[small[0]] + size[small[1]] > room[k]:
            continue
        first = small.pop(0)
        second = max(
            j for j, i in enumerate(small) if size[i] <= room[k] - size[first]
        )  # small ascends, so the last that fits is the largest
        for i in (first, small.pop(second)):
            bins[k].append(i)
            room[k] -= size[i]
    left = sorted([*medium, *small, *tiny], key=lambda i: -size[i])
    for k in range(len(bins)):
        while _take_first_that_fits(left, k, bins, room, size):
            pass
    rest: list[tuple[int, list[int]]] = []  # (tokens, members), least full first
    for i in left:
        tokens, members = 0, list[int]()
        if rest and rest[0][0] + size[i] <= capacity:
            tokens, members = rest.pop(0)
        insort(rest, (tokens + size[i], [*members, i]), key=lambda new: new[0])
    return bins + [members for _, members in rest]


def _take_first_that_fits(
    items: list[int], k: int, bins: list[list[int]], room: list[int], size: list[int]
) -> bool:
    """Move the first of `items` that fits into bin k; False when none does."""
    for position, i in enumerate(items):
        if size[i] <= room[k]:
            bins[k].append(items.pop(position))
            room[k] -= size[i]
            return True
    return False


def _raise_to(bins: list[list[int]], target: int) -> None:
    """Open bins up to `target`, each with the last item of the most populated bin, in place."""
    by_count = sorted(((len(members), k) for k, members in enumerate(bins)), reverse=True)
    sources = iter(by_count)
    _, source = next(sources)
    while len(bins) < target:
        while len(bins[source]) == 1:
            _, source = next(sources)
        bins.append([bins[source].pop()])
