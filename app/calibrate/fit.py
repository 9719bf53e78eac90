"""Non-negative least squares of Equation 2, and how well its predictions hold elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageFit:
    """One stage's fitted seconds: linear * sum t/C + pairs * sum (t/C)^2."""

    name: str
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
        return features @ np.array([self.linear, self.pairs])


def fit_stage(
    name: str, features: np.ndarray, seconds: np.ndarray, *, has_pairs: bool = True
) -> StageFit:
    """Fit one stage to measured seconds [cell]; relative errors count alike.

    features: [cell, 2] of (sum t/C, sum (t/C)^2). has_pairs: False keeps beta at 0 (FFN, KDA).
    Raises ValueError for fewer cells than coefficients or a time that is not positive.
    """
    features, seconds = np.asarray(features, np.float64), np.asarray(seconds, np.float64)
    num_used = 2 if has_pairs else 1
    if len(seconds) < num_used or len(seconds) != len(features):
        raise ValueError(
            f"stage {name}: {len(seconds)} times for {len(features)} cells, expected one for each "
            f"of at least {num_used} cells"
        )
    if not (np.isfinite(seconds) & (seconds > 0)).all():
        raise ValueError(f"stage {name}: every measured time must be positive, got {seconds.min()}")
    scaled = features[:, :num_used] / seconds[:, None]
    coefficients = np.zeros(2)
    coefficients[:num_used] = nnls(scaled, np.ones(len(seconds)))[0]
    residual = seconds - features @ coefficients
    return StageFit(
        name=name,
        linear=float(coefficients[0]),
        pairs=float(coefficients[1]),
        r2=r_squared(seconds, features @ coefficients),
        residual=residual,
    )


def r_squared(measured: np.ndarray, predicted: np.ndarray) -> float:
    """1 - residual sum of squares / total sum of squares; 0 when nothing varies."""
    measured, predicted = np.asarray(measured), np.asarray(predicted)
    total = ((measured - measured.mean()) ** 2).sum()
    return float(1 - ((measured - predicted) ** 2).sum() / total) if total > 0 else 0.0
