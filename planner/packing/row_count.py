"""How many rows a window needs: R_min, its bound, and what few trajectories allow (Section 3.1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.packing.bin_slack import minimum_bin_slack
from planner.packing.first_fit import (
    best_fit_decreasing,
    cells_lower_bound,
    first_fit,
    first_fit_decreasing,
)
from planner.topology import Topology


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowCount:
    """The fewest rows known to be feasible, beside the bound that no packing can beat."""

    value: int
    """R_min as found: rows, a multiple of the topology's row multiple."""
    bound: int
    """Lower bound on R_min in rows, a multiple of the row multiple."""
    cell: np.ndarray
    """[trajectory] cell of the packing behind `value`, 0 .. num_cells - 1."""
    num_cells: int

    @property
    def certified(self) -> bool:
        """True when the value equals the bound."""
        return self.value == self.bound


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def rows_of_cells(num_cells: int, topology: Topology) -> int:
    """Rows that hold so many cells: divided over the DP slots, raised to the row multiple."""
    return round_up(-(-num_cells // topology.num_dp_slots), topology.row_multiple)


def most_rows(num_trajectories: int, topology: Topology) -> int:
    """Most rows without an empty cell: floor(N / D), lowered to the row multiple; may be 0."""
    rows = num_trajectories // topology.num_dp_slots
    return rows - rows % topology.row_multiple


def _arrival_fit(length: np.ndarray, capacity: int, enough: int) -> tuple[np.ndarray, int]:
    """slime's packing, so that R_min never exceeds it."""
    return first_fit(length, np.arange(len(length)), capacity)


def _best_fit(length: np.ndarray, capacity: int, enough: int) -> tuple[np.ndarray, int]:
    return best_fit_decreasing(length, capacity)


def row_count(length: np.ndarray, topology: Topology) -> RowCount:
    """R_min for length [trajectory]: FFD, then others while the bound is missed."""
    bound = rows_of_cells(cells_lower_bound(length, topology.capacity), topology)
    cell, num_cells = first_fit_decreasing(length, topology.capacity)
    for pack in (_arrival_fit, _best_fit, minimum_bin_slack):
        if rows_of_cells(num_cells, topology) == bound:
            break
        other, fewer = pack(length, topology.capacity, bound * topology.num_dp_slots)
        if rows_of_cells(fewer, topology) < rows_of_cells(num_cells, topology):
            cell, num_cells = other, fewer
    return RowCount(
        value=rows_of_cells(num_cells, topology), bound=bound, cell=cell, num_cells=num_cells
    )


def raised_to_pipeline_floor(rows: int, num_trajectories: int, topology: Topology) -> int:
    """R* = max(R, 2 PP), as far as no cell stays empty (Equation 8)."""
    floor = round_up(2 * topology.pp, topology.row_multiple) if topology.pp > 1 else 1
    return max(rows, min(floor, most_rows(num_trajectories, topology)))


def count_kept(length: np.ndarray, group: np.ndarray, topology: Topology) -> tuple[int, RowCount]:
    """(trajectories kept, their row count): whole trailing groups go until no cell stays empty.

    Args: length [trajectory] tokens; group [trajectory] GRPO ids in arrival order. Raises
    ValueError when not even a part of the window can be run.
    """
    kept = len(length)
    while kept > 0:
        found = row_count(length[:kept], topology)
        if found.value <= most_rows(kept, topology):
            return kept, found
        last = group[kept - 1]
        while kept > 0 and group[kept - 1] == last:
            kept -= 1
    raise too_few(length, topology)


def check_batch_size(num_trajectories: int, topology: Topology) -> None:
    """Raises ValueError at launch when no lengths could give rows without an empty cell."""
    if most_rows(num_trajectories, topology) == 0:
        needed = topology.num_dp_slots * topology.row_multiple
        raise ValueError(
            f"batch size: {num_trajectories} trajectories in an optimizer step, but "
            f"dp={topology.num_dp_slots} with a row multiple of {topology.row_multiple} "
            f"(vpp={topology.vpp}, cap {topology.capacity} tokens) needs at least {needed}; raise "
            "the batch size, or lower dp or the VPP group"
        )


def too_few(length: np.ndarray, topology: Topology) -> ValueError:
    """The error for a window whose rows would need an empty cell."""
    needed = row_count(length, topology).value
    allowed = most_rows(len(length), topology)
    return ValueError(
        f"too few trajectories: {len(length)} trajectories need {needed} rows (cap "
        f"{topology.capacity} tokens, row multiple {topology.row_multiple} for "
        f"vpp={topology.vpp}) on dp={topology.num_dp_slots}, but allow only {allowed} rows "
        "without an empty cell; raise the batch size or the cap, or lower dp or the VPP group"
    )
