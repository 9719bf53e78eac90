"""Global length FFD at a fixed number of rows: where the search starts (Section 4.1)."""

from __future__ import annotations

import numpy as np

from planner.packing.first_fit import split_to_count
from planner.packing.row_count import RowCount
from planner.rows import Rows
from planner.topology import Topology


def global_ffd_rows(
    length: np.ndarray, topology: Topology, packed: RowCount, num_rows: int
) -> Rows:
    """The packing of `packed` on exactly num_rows rows: FFD's cell c is row c // D, slot c mod D.

    Raises ValueError when num_rows is below the packing or leaves a cell empty.
    """
    num_cells = num_rows * topology.num_dp_slots
    cell = None
    if num_rows >= packed.value:
        cell = split_to_count(packed.cell, packed.num_cells, num_cells, length)
    if cell is None:
        raise ValueError(
            f"num_rows: got {num_rows}, expected between {packed.value} (the packing) and "
            f"{len(length) // topology.num_dp_slots} (one trajectory for each cell)"
        )
    return Rows(cell=cell.astype(np.int32), num_rows=num_rows, num_dp_slots=topology.num_dp_slots)
