"""verl's rows: Karmarkar-Karp over the DP slots, then over each slot's micro-batches.

A trajectory of t tokens weighs 24576 t + t^2. Slots get equal counts; a slot's micro-batches are
as many as the fullest slot's tokens need (raised to the VPP multiple), of any count, ordered so
that light ones stand at both ends.
Peer: verl `utils/seqlen_balancing.py` and `_balance_batch`. Two repairs keep the result executable:
verl pads a batch that does not divide over the slots, here the slots' counts differ by one; and
verl's micro-batches may exceed the cap (verl#7553), here their number grows until none does.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.packing.row_count import most_rows, round_up
from planner.rows import Rows
from planner.topology import Topology

_LINEAR = 24576  # 12 h^2 t + 2 h t^2 FLOPs at hidden size h = 4096, divided by 2 h


def verl_rows(length: NDArray[np.integer], topology: Topology) -> Rows | None:
    """Rows of length `[trajectory]`; None when there are too few trajectories for them."""
    lengths = [int(t) for t in length]
    work = [_LINEAR * t + t * t for t in lengths]
    slots = karmarkar_karp(work, topology.num_dp_slots, equal_size=True)
    most = most_rows(len(lengths), topology)
    tokens = [sum(lengths[i] for i in members) for members in slots]
    num_rows = round_up(max(1, -(-max(tokens) // topology.capacity)), topology.row_multiple)
    while num_rows <= most:
        cell = np.empty(len(lengths), np.int32)
        fits = True
        for slot, members in enumerate(slots):
            parts = karmarkar_karp([work[i] for i in members], num_rows, equal_size=False)
            cells = [[members[k] for k in part] for part in parts]
            fits &= all(_fits(part, lengths, topology.capacity) for part in cells)
            for row, part in enumerate(_light_at_both_ends(cells, work)):
                cell[part] = row * topology.num_dp_slots + slot
        if fits:
            return Rows(cell=cell, num_rows=num_rows, num_dp_slots=topology.num_dp_slots)
        num_rows += topology.row_multiple
    return None


def karmarkar_karp(weight: Sequence[int], num_parts: int, *, equal_size: bool) -> list[list[int]]:
    """Largest differencing: parts of nearly equal weight, each ascending, none empty.

    equal_size: parts have the same count; where the items do not divide, weightless ones fill up.
    Raises ValueError when there are fewer items than parts.
    """
    if num_parts < 1 or len(weight) < num_parts:
        raise ValueError(f"num_parts: expected 1 to {len(weight)} (the items), got {num_parts}")
    num_items = len(weight)
    order = sorted((w, i) for i, w in enumerate(weight))
    if equal_size:
        fill = -num_items % num_parts
        order = [(0, num_items + k) for k in range(fill)] + order
        tuples = [
            _Tuple([_Part(w, [(i, w)]) for w, i in order[first : first + num_parts]])
            for first in range(0, len(order), num_parts)
        ]
    else:
        empty = [_Part(0, []) for _ in range(num_parts - 1)]
        tuples = [_Tuple([_Part(w, [(i, w)]), *empty]) for w, i in order]
    heapq.heapify(tuples)
    while len(tuples) > 1:
        wide = heapq.heappop(tuples)
        heapq.heappush(tuples, wide.merged(heapq.heappop(tuples)))
    parts = [sorted(i for i, _ in part.items if i < num_items) for part in tuples[0].parts]
    for part in parts:
        if not part:
            part.append(max(parts, key=len).pop())
    return parts


class _Part:
    """One side of a difference; ordered by weight, then count, then items."""

    __slots__ = ("items", "key", "total")

    def __init__(self, total: int, items: list[tuple[int, int]]) -> None:
        self.total = total
        self.items = items
        self.key = (total, len(items), items)


class _Tuple:
    """Parts by falling key; the widest spread comes out of the heap first."""

    __slots__ = ("parts", "spread")

    def __init__(self, parts: list[_Part]) -> None:
        self.parts = sorted(parts, key=lambda part: part.key, reverse=True)
        self.spread = self.parts[0].total - self.parts[-1].total

    def merged(self, other: _Tuple) -> _Tuple:
        """Heaviest with lightest."""
        return _Tuple(
            [
                _Part(a.total + b.total, a.items + b.items)
                for a, b in zip(self.parts, reversed(other.parts), strict=True)
            ]
        )

    def __lt__(self, other: _Tuple) -> bool:
        if self.spread != other.spread:
            return self.spread > other.spread
        return self.parts[0].key > other.parts[0].key


def _light_at_both_ends(cells: list[list[int]], work: list[int]) -> list[list[int]]:
    """The micro-batches of one slot, heaviest in the middle of the pipeline."""
    falling = sorted(cells, key=lambda part: (sum(work[i] for i in part), part[0]), reverse=True)
    return falling[::2][::-1] + falling[1::2]


def _fits(part: list[int], lengths: list[int], capacity: int) -> bool:
    return len(part) == 1 or sum(lengths[i] for i in part) <= capacity
