"""Median, interquartile range and bootstrap intervals of paired ratios and differences."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A mean with its 95% bootstrap interval [low, high]."""

    mean: float
    low: float
    high: float

    @property
    def holds_zero(self) -> bool:
        """No difference is proven."""
        return self.low <= 0.0 <= self.high


def paired_curves(differences: np.ndarray, block: int, seed: int = 0) -> Interval:
    """Mean of paired differences [seed, window] of two learning curves, with its interval.

    Hierarchical block bootstrap: seeds are resampled, then within each blocks of `block`
    consecutive windows, since windows of one run share their weights and are not independent.
    Raises ValueError for curves shorter than one block.
    """
    differences = np.asarray(differences, np.float64)
    num_seeds, num_windows = differences.shape
    num_blocks = num_windows // block
    if num_blocks < 1:
        raise ValueError(f"{num_windows} windows hold no block of {block}: train more windows")
    used = differences[:, : num_blocks * block].reshape(num_seeds, num_blocks, block).mean(axis=2)
    rng = np.random.default_rng(seed)
    seeds = rng.integers(num_seeds, size=(NUM_RESAMPLES, num_seeds, 1))
    blocks = rng.integers(num_blocks, size=(NUM_RESAMPLES, num_seeds, num_blocks))
    means = used[seeds, blocks].mean(axis=(1, 2))
    return Interval(
        mean=float(differences.mean()),
        low=float(np.percentile(means, 2.5)),
        high=float(np.percentile(means, 97.5)),
    )
