"""Execution rows: which trajectories every DP slot runs in which synchronized micro-step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rows:
    """An assignment of trajectories to the cells B_rd of R rows and D DP slots (Section 2.1).

    Raises ValueError when a cell lies outside [-1, R * D).
    """

    cell: np.ndarray
    """[trajectory] row * D + DP slot, or -1 for a dropped trajectory; int32."""
    num_rows: int
    num_dp_slots: int

    def __post_init__(self) -> None:
        cell = np.array(self.cell, np.int32)
        cell.setflags(write=False)
        object.__setattr__(self, "cell", cell)
        if self.num_rows < 1 or self.num_dp_slots < 1:
            raise ValueError(
                f"Rows: got {self.num_rows} rows of {self.num_dp_slots} DP slots, expected >= 1"
            )
        if cell.ndim != 1 or (len(cell) and (cell.min() < -1 or cell.max() >= self.num_cells)):
            raise ValueError(
                f"Rows.cell: expected one index in [-1, {self.num_cells}) for each trajectory, got "
                f"shape {cell.shape} with values up to {cell.max() if cell.size else None}"
            )

    @property
    def num_cells(self) -> int:
        return self.num_rows * self.num_dp_slots

    @property
    def num_dropped(self) -> int:
        return int((self.cell < 0).sum())

    @property
    def kept(self) -> np.ndarray:
        """Indices of the trajectories that are executed, ascending."""
        return np.flatnonzero(self.cell >= 0)

    def trajectories(self, row: int, slot: int) -> np.ndarray:
        """Indices of the trajectories of one cell, ascending, int64."""
        return np.flatnonzero(self.cell == row * self.num_dp_slots + slot)

    def cell_tokens(self, length: np.ndarray) -> np.ndarray:
        """[row, DP slot] tokens, for `length` in tokens per trajectory."""
        kept = self.kept
        tokens = np.zeros(self.num_cells, np.int64)
        np.add.at(tokens, self.cell[kept], np.asarray(length, np.int64)[kept])
        return tokens.reshape(self.num_rows, self.num_dp_slots)
