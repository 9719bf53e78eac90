"""What the paired comparison measured, as plain values: light to import."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

CONTROL, IDEAL = "base (control)", "ideal"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One policy on one window. tps: positions per second of each timed repeat.

    J1_over_B: the plan's joint cost over the lower bound; None for the ideal.
    times: seconds of place, aux, plan, state, batch_await (docs/metrics.md).
    rank_max_over_mean: mean over layers of the busiest EP rank's load over the mean rank's.
    loss, loss_magnitude: of the first step from the snapshot.
    """

    window: int
    policy: str
    tps: list[float]
    window_seconds: float
    exposed: float
    commit_seconds: float
    moved_experts: int
    moved_mb: float
    rows: int
    joint_cost: float
    J1_over_B: float | None
    times: dict[str, float]
    rank_max_over_mean: float
    loss: float
    loss_magnitude: float

    @property
    def median_tps(self) -> float:
        """Median over the timed repeats."""
        return statistics.median(self.tps)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Everything that was measured, with what else used the machine meanwhile.

    skew: mean rank max/mean of the first window's tokens without and with the configured skew.
    rank_load: of the last window under identity and under full. rows: of off and full there.
    """

    measurements: list[Measurement]
    max_log_prob_difference: float
    equal_rows: float
    other_load: float
    skew: tuple[float, float]
    rank_load: dict[str, Any]
    rows: dict[str, Any]
