"""What every search engine returns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Found:
    """The best layout of a search."""

    cell: np.ndarray
    """[trajectory] internal cell."""
    key: tuple[float, float, float]
    """Its score (Equation 16)."""
    num_proposals: int
    """Proposals drawn, over all chains."""
    seconds: float
    """Wall time."""
