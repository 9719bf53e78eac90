"""The base policy's rows: DP-local FFD (Section 4.2, Appendix K)."""

from __future__ import annotations

import numpy as np

from planner.packing.row_count import most_rows, raised_to_pipeline_floor, round_up
from planner.rows import Rows
from planner.topology import Topology

SHUFFLE_SEED = 42


def deal_to_slots(num_trajectories: int, num_dp_slots: int, shard_size: int) -> list[np.ndarray]:
    """Trajectory indices of each DP slot: shard j of `shard_size` goes to slot j mod D.

    With fewer shards than slots, single trajectories are dealt instead.
    """
    index = np.arange(num_trajectories)
    size = shard_size if -(-num_trajectories // shard_size) >= num_dp_slots else 1
    return [index[(index // size) % num_dp_slots == slot] for slot in range(num_dp_slots)]


def pack_slot(length: np.ndarray, order: np.ndarray, capacity: int) -> list[list[int]]:
    """Cells of one slot: each trajectory, in order, into the feasible cell with fewest
    trajectories.

    Ties go to the earliest opened cell; a new cell opens when none fits.
    """
    cells: list[list[int]] = []
    load: list[int] = []
    for i in order:
        fits = [k for k in range(len(cells)) if load[k] + length[i] <= capacity]
        if fits:
            k = min(fits, key=lambda k: len(cells[k]))
        else:
            k = len(cells)
            cells.append([])
            load.append(0)
        cells[k].append(int(i))
        load[k] += int(length[i])
    return cells


def dp_local_ffd(
    length: np.ndarray,
    window_id: int,
    topology: Topology,
    *,
    shard_size: int = 8,
    pipeline_floor: bool = False,
) -> Rows | None:
    """The base rows of length [trajectory]; None when some slot would need an empty cell.

    Cell k of a slot is row k. The slots agree on the largest count, raised to the row multiple (and
    to 2 PP with `pipeline_floor`); a slot with fewer cells splits the smallest trajectory off its
    most populated cell, and takes one from the fullest slot when it has none to split.
    """
    num, num_slots = len(length), topology.num_dp_slots
    rng = np.random.default_rng([SHUFFLE_SEED, window_id])
    slots = []
    for members in deal_to_slots(num, num_slots, shard_size):
        shuffled = members[rng.permutation(len(members))]
        order = shuffled[np.argsort(-length[shuffled], kind="stable")]
        slots.append(pack_slot(length, order, topology.capacity))
    rows = round_up(max(len(cells) for cells in slots), topology.row_multiple)
    if pipeline_floor:
        rows = raised_to_pipeline_floor(rows, num, topology)
    if rows > most_rows(num, topology):
        return None
    for cells in slots:
        while len(cells) < rows:
            source: list[int] = max(cells, key=len, default=[])
            if len(source) < 2:
                fullest = max(slots, key=lambda other: sum(len(cell) for cell in other))
                source = max(fullest, key=len)
            if len(source) < 2:
                return None
            cells.append([source.pop(_smallest(source, length))])
    cell = np.empty(num, np.int32)
    for slot, cells in enumerate(slots):
        for row, indices in enumerate(cells):
            cell[indices] = row * num_slots + slot
    return Rows(cell=cell, num_rows=rows, num_dp_slots=num_slots)


def _smallest(members: list[int], length: np.ndarray) -> int:
    """Position of the shortest trajectory, ties to the earliest."""
    return min(range(len(members)), key=lambda k: (length[members[k]], members[k]))
