"""Non-negative least squares of Equation 2, and how well its predictions hold elsewhere.

A constant is fitted beside alpha and beta: what a row costs whatever it holds (launches, optimizer
bookkeeping). It is the same for all layouts of R rows, so the planner's cost has no place for it;
left out of the fit it would bend alpha.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageFit:
    """One stage's fitted seconds: constant + linear * sum t/C + pairs * sum (t/C)^2."""

    name: str
    constant: float
    """Seconds of a row whatever it holds."""
    linear: float
    """Seconds of a full cell's token-linear work."""
    pairs: float
    """Seconds of one capacity-long trajectory's token-pair work."""
    r2: float
    """Share of the variance of the fitted cells that the fit explains."""
    residual: np.ndarray
    """[cell] measured - fitted, seconds."""

    def predict(self, features: np.ndarray) -> np.ndarray:
        """[cell] seconds for features [cell, 2] of (sum t/C, sum (t/C)^2)."""
        return self.constant + features @ np.array([self.linear, self.pairs])


def fit_stage(
    name: str, features: np.ndarray, seconds: np.ndarray, *, has_pairs: bool = True
) -> StageFit:
    """Fit one stage to measured seconds [cell]; relative errors count alike.

    features: [cell, 2] of (sum t/C, sum (t/C)^2). has_pairs: False keeps beta at 0 (FFN, KDA).
    Raises ValueError for fewer cells than coefficients or a time that is not positive.
    """
    features, seconds = np.asarray(features, np.float64), np.asarray(seconds, np.float64)
    num_used = 3 if has_pairs else 2
    if len(seconds) < num_used or len(seconds) != len(features):
        raise ValueError(
            f"stage {name}: {len(seconds)} times for {len(features)} cells, expected one for each "
            f"of at least {num_used} cells"
        )
    if not (np.isfinite(seconds) & (seconds > 0)).all():
        raise ValueError(f"stage {name}: every measured time must be positive, got {seconds.min()}")
    columns = np.column_stack([np.ones(len(seconds)), features])
    coefficients = np.zeros(3)
    scaled = columns[:, :num_used] / seconds[:, None]
    coefficients[:num_used] = nnls(scaled, np.ones(len(seconds)))[0]
    predicted = columns @ coefficients
    constant, linear, pairs = map(float, coefficients)
    return StageFit(
        name=name,
        constant=constant,
        linear=linear,
        pairs=pairs,
        r2=r_squared(seconds, predicted),
        residual=seconds - predicted,
    )


def r_squared(measured: np.ndarray, predicted: np.ndarray) -> float:
    """1 - residual sum of squares / total sum of squares; 0 when nothing varies."""
    measured, predicted = np.asarray(measured), np.asarray(predicted)
    total = ((measured - measured.mean()) ** 2).sum()
    return float(1 - ((measured - predicted) ** 2).sum() / total) if total > 0 else 0.0
