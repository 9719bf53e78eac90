"""Self-calibration in training: row times are measured, the cost model is re-fitted, rows follow.

Every k windows `app.local.refit.refit` scales the configured coefficients to what the
rows of the last windows took; the next windows are planned with the result.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from app.config import RunConfig
from app.local.admit import Admitted
from app.local.refit import RowObservation, observe, refit
from app.local.trainer import StepResult
from planner.plan import Plan
from planner.topology import Topology
from planner.window import Window

logger = logging.getLogger(__name__)

KEPT_PERIODS = 4
"""Rows of this many periods of `recalibrate_every` windows are fitted."""

LEAST_R2 = 0.5
"""A fit that explains less of the row times than this is logged, and not planned with."""

RowTimes = Callable[[StepResult, Window, Plan, Topology], np.ndarray]
"""Seconds [row, EDP shard] of an executed optimizer step."""


def measured_rows(step: StepResult, window: Window, plan: Plan, topology: Topology) -> np.ndarray:
    """The slowest rank of every shard: its EP group waits for it in each layer."""
    return np.stack(
        [step.row_seconds[:, list(slots)].max(axis=1) for slots in topology.edp_shards], axis=1
    )


class SelfCalibration:
    """The cost model in use, re-fitted every `planner.recalibrate_every` windows.

    The first window of a run is left out: it pays for first calls. Rows that cannot be fitted, or
    whose fit explains too little, leave the cost model as it is, with a warning that says why.
    """

    def __init__(self, config: RunConfig, row_times: RowTimes = measured_rows):
        self.every = config.planner.recalibrate_every
        self.topology, self.configured = config.topology, config.cost
        self.cost = config.cost
        self.row_times = row_times
        self.metrics: dict[str, float] = {}
        self._kept: deque[list[RowObservation]] = deque(maxlen=KEPT_PERIODS * max(self.every, 1))
        self._num_windows = 0

    def add(self, admitted: Admitted, steps: Sequence[StepResult]) -> dict[str, float]:
        """Take one trained window; return `calibrate/*` of the latest fit, if there is one."""
        if not self.every:
            return {}
        self._num_windows += 1
        if self._num_windows > 1:
            self._kept.append(
                [
                    observe(
                        window,
                        plan.rows,
                        self.topology,
                        plan.placement,
                        self.row_times(step, window, plan, self.topology),
                    )
                    for step, window, plan in zip(
                        steps, admitted.windows, admitted.plans, strict=True
                    )
                ]
            )
        if self._num_windows % self.every == 0 and self._kept:
            self._refit()
        return self.metrics

    def _refit(self) -> None:
        observations = [one for window in self._kept for one in window]
        try:
            found = refit(observations, self.configured)
        except ValueError as error:
            logger.warning("self-calibration keeps the costs it has: %s", error)
            return
        self.metrics = {"calibrate/drift": found.drift, "calibrate/r2": found.r2}
        if found.r2 < LEAST_R2:
            logger.warning(
                "self-calibration keeps the costs it has: the fit explains %.0f%% of the variance "
                "of row times, at least %.0f%% are needed; is the machine busy?",
                100 * found.r2,
                100 * LEAST_R2,
            )
            return
        self.cost = found.cost
