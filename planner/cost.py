"""The dense-side cost of a cell (Section 2.2); the expert term has weight 1 (Equations 14-16)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One dense-side stage: alpha/C * sum t + beta * sum (t/C)^2 on a cell (Equation 2)."""

    name: str
    alpha: float
    """Cost of a full cell's token-linear work."""
    beta: float = 0.0
    """Cost of one capacity-long trajectory's token-pair work; 0 for KDA and dense FFN."""

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(
                    f"Stage {self.name!r}.{name}: got {value}, expected a finite number >= 0"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """The dense-side stages, in units where C routed tokens on the busiest EP rank cost 1.

    Coefficients are per DP slot at the job's TP and CP. Raises ValueError on repeated names.
    """

    stages: tuple[Stage, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(self.stages))
        names = [stage.name for stage in self.stages]
        if len(set(names)) != len(names):
            raise ValueError(f"CostModel.stages: names repeat in {names}; give each stage its own")

    @property
    def alpha(self) -> np.ndarray:
        """[stage] token-linear coefficients."""
        return np.array([stage.alpha for stage in self.stages], np.float64)

    @property
    def beta(self) -> np.ndarray:
        """[stage] token-pair coefficients."""
        return np.array([stage.beta for stage in self.stages], np.float64)

    def dense_work(self, length: np.ndarray, capacity: int) -> np.ndarray:
        """[trajectory] dense-side work, all stages added: alpha t/C + beta (t/C)^2."""
        share = np.asarray(length, np.float64) / capacity
        return self.alpha.sum() * share + self.beta.sum() * share**2
