"""slime's own schedule, re-implemented: pack first, distribute second.

Peer: slime/utils/dp_schedule.py and seqlen_balancing.py. Trajectories go first-fit, in arrival
order, into bins of C tokens; the heaviest bin of several trajectories is halved until the number of
bins is a multiple of D (times the VPP group); bins go to the DP slots strided, or by
Karmarkar-Karp largest differencing with equal counts (`--balance-data`).
"""

from __future__ import annotations

import heapq

import numpy as np

from planner.packing.first_fit import first_fit
from planner.packing.row_count import round_up
from planner.rows import Rows
from planner.topology import Topology


def slime_rows(
    length: np.ndarray,
    topology: Topology,
    *,
    balance_data: bool = False,
    workload: np.ndarray | None = None,
) -> Rows | None:
    """slime's rows of length [trajectory]; None when it would stop for want of trajectories.

    Args: workload [trajectory] compute of each, needed by `balance_data` (default: the length).
    """
    num_slots = topology.num_dp_slots
    cell, num_bins = first_fit(length, np.arange(len(length)), topology.capacity)
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for i, k in enumerate(cell.tolist()):
        bins[k].append(i)
    target = round_up(num_bins, num_slots * topology.row_multiple)
    if not split_heaviest_bins(bins, target, length):
        return None
    if balance_data:
        work = np.asarray(length if workload is None else workload)
        weights = [sum(work[i].item() for i in members) for members in bins]
        of_slot = largest_differencing(weights, num_slots)
    else:
        of_slot = [list(range(slot, target, num_slots)) for slot in range(num_slots)]
    rows_cell = np.empty(len(length), np.int32)
    for slot, owned in enumerate(of_slot):
        for row, k in enumerate(owned):
            rows_cell[bins[k]] = row * num_slots + slot
    return Rows(cell=rows_cell, num_rows=target // num_slots, num_dp_slots=num_slots)


def split_heaviest_bins(bins: list[list[int]], target: int, length: np.ndarray) -> bool:
    """Halves the heaviest bin of two or more trajectories until there are `target` bins, in place.

    Ties go to the latest bin; the second half is appended. False when all are single too early.
    """
    splittable = [(-int(length[of].sum()), -k) for k, of in enumerate(bins) if len(of) > 1]
    heapq.heapify(splittable)
    while len(bins) < target:
        if not splittable:
            return False
        heaviest = -heapq.heappop(splittable)[1]
        halves: tuple[list[int], list[int]] = ([], [])
        tokens = [0, 0]
        for i in sorted(bins[heaviest], key=lambda i: -int(length[i])):
            side = 0 if tokens[0] <= tokens[1] else 1
            halves[side].append(i)
            tokens[side] += int(length[i])
        for half, total, k in zip(halves, tokens, (heaviest, len(bins)), strict=True):
            if len(half) > 1:
                heapq.heappush(splittable, (-total, -k))
        bins[heaviest] = halves[0]
        bins.append(halves[1])
    return True


def largest_differencing(weights: list[float], num_parts: int) -> list[list[int]]:
    """Karmarkar-Karp: parts of equal count and nearly equal weight, each ascending.

    Sorted weights are cut into tuples of `num_parts`; the two tuples of largest spread are merged,
    heaviest part with lightest, until one is left. Ties as in the peer: the larger (sum, count,
    items) part first.
    """
    order = sorted(range(len(weights)), key=lambda i: (weights[i], i))
    # A part is (sum, count, [(index, weight), ...]); a heap entry sorts by falling spread.
    heap: list[_Tuple] = []
    for first in range(0, len(order), num_parts):
        parts = [(weights[i], 1, [(i, weights[i])]) for i in order[first : first + num_parts]]
        heapq.heappush(heap, _Tuple(sorted(parts, reverse=True)))
    while len(heap) > 1:
        wide, next_wide = heapq.heappop(heap), heapq.heappop(heap)
        merged = [
            (a[0] + b[0], a[1] + b[1], a[2] + b[2])
            for a, b in zip(wide.parts, reversed(next_wide.parts), strict=True)
        ]
        heapq.heappush(heap, _Tuple(sorted(merged, reverse=True)))
    return [sorted(index for index, _ in part[2]) for part in heap[0].parts]


class _Tuple:
    """Parts by falling (sum, count, items); ordered in the heap by falling spread."""

    __slots__ = ("parts",)

    def __init__(self, parts: list[tuple[float, int, list[tuple[int, float]]]]) -> None:
        self.parts = parts

    def __lt__(self, other: _Tuple) -> bool:
        mine = self.parts[0][0] - self.parts[-1][0]
        theirs = other.parts[0][0] - other.parts[-1][0]
        if mine != theirs:
            return mine > theirs
        return self.parts[0] > other.parts[0]
