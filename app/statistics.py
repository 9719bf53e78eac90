"""Median, interquartile range and bootstrap interval of paired ratios."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NUM_RESAMPLES = 4000


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Median with its 95% bootstrap interval [low, high] and the quartiles [q1, q3]."""

    median: float
    low: float
    high: float
    q1: float
    q3: float

    def figures(self, name: str) -> dict[str, float]:
        """Return the figures `name.median`, `.ci_low`, `.ci_high`, `.q1`, `.q3`."""
        return {
            f"{name}.median": self.median,
            f"{name}.ci_low": self.low,
            f"{name}.ci_high": self.high,
            f"{name}.q1": self.q1,
            f"{name}.q3": self.q3,
        }


def spread(values: Sequence[float], seed: int = 0) -> Spread:
    """Summarise one value per window; raises ValueError for no values."""
    data = np.asarray(values, dtype=np.float64)
    if not len(data):
        raise ValueError("no values: nothing was measured")
    rng = np.random.default_rng(seed)
    resamples = rng.choice(data, size=(NUM_RESAMPLES, len(data)))
    medians = np.median(resamples, axis=1)
    return Spread(
        median=float(np.median(data)),
        low=float(np.percentile(medians, 2.5)),
        high=float(np.percentile(medians, 97.5)),
        q1=float(np.percentile(data, 25)),
        q3=float(np.percentile(data, 75)),
    )
