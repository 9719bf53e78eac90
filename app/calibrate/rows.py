"""Cells to measure: trajectories' lengths, with varied totals and varied mixes at one total.

Totals are odd: those divisible by large powers of two run into cache conflicts (20% on a CPU) that
a window's cells, which are never exactly full, do not meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LONGEST_SHARES = (1.0, 0.75, 0.5, 0.375, 0.25, 0.1875, 0.125)
"""Longest trajectory of a cell, as a share of its capacity: what moves sum (t/C)^2 at one total."""

EQUAL_SHARE = 0.9
"""Tokens of the cells of equal totals, as a share of the capacity."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Lengths of one cell, in positions fed to the model."""

    length: tuple[int, ...]

    def share(self, capacity: int) -> float:
        """sum t/C: the token-linear feature of Equation 2."""
        return sum(self.length) / capacity

    def pairs(self, capacity: int) -> float:
        """sum (t/C)^2: the token-pair feature of Equation 2."""
        return float(sum((t / capacity) ** 2 for t in self.length))


def features(cells: Sequence[Cell], capacity: int) -> np.ndarray:
    """[cell, 2] of (sum t/C, sum (t/C)^2)."""
    return np.array([[cell.share(capacity), cell.pairs(capacity)] for cell in cells])


def varied_cells(capacity: int, num_cells: int, rng: np.random.Generator) -> list[Cell]:
    """Cells of every mix whose totals run from 40% to 100% of the capacity, in random order."""
    totals = np.linspace(0.4, 1.0, num_cells)
    cells = [
        _cell(_odd(share * capacity), LONGEST_SHARES[i % len(LONGEST_SHARES)], capacity, rng)
        for i, share in enumerate(rng.permutation(totals))
    ]
    return [cells[i] for i in rng.permutation(num_cells)]


def equal_token_cells(capacity: int, num_cells: int, rng: np.random.Generator) -> list[Cell]:
    """Cells that hold 90% of the capacity each, in mixes from one trajectory to many."""
    shares = [LONGEST_SHARES[i % len(LONGEST_SHARES)] for i in range(num_cells)]
    return [_cell(_odd(EQUAL_SHARE * capacity), share, capacity, rng) for share in shares]


def _odd(total: float) -> int:
    """The largest odd number up to `total`."""
    return (int(total) - 1) // 2 * 2 + 1


def _cell(total: int, longest_share: float, capacity: int, rng: np.random.Generator) -> Cell:
    """Lengths between half of the longest and the longest, the last one cut to meet the total."""
    longest = max(2, round(longest_share * capacity))
    length: list[int] = []
    left = total
    while left > 0:
        drawn = longest if not length else int(rng.integers(max(1, longest // 2), longest + 1))
        length.append(min(drawn, left))
        left -= length[-1]
    return Cell(length=tuple(length))
