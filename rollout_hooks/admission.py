"""Admission of a window: place at once, schedule on a thread while state loads, join.

The order is the paper's Figure 9: placement is ready milliseconds after sealing, so that state
loading can commit it; rows are searched on the CPU at the same time; both meet at training
admission. Planning may never stop training: a planner that raises, overruns its deadline or
returns a plan that does not validate falls back to base rows and the placement already carried.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from planner.cost import CostModel
from planner.placement import Placement
from planner.plan import Plan
from planner.policy import (
    PlacementResult,
    PlannerOptions,
    RowsResult,
    assemble_plan,
    place,
    schedule,
)
from planner.topology import Topology
from planner.window import Window

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannerCalls:
    """The two planner decisions as plain functions, so that a test can make them fail."""

    place: Callable[..., PlacementResult] = place
    schedule: Callable[..., RowsResult] = schedule


class Once:
    """Calls a function the first time only; later callers get its result, or its error.

    For the placement of a rollout, which all of its optimizer steps share.
    """

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.found: tuple[Any, Exception | None] | None = None

    def __call__(self, *arguments: Any) -> Any:
        if self.found is None:
            try:
                self.found = self.function(*arguments), None
            except Exception as error:
                self.found = None, error
        result, error = self.found
        if error is not None:
            raise error
        return result


@dataclass(kw_only=True, slots=True)
class Admission:
    """One window between sealing and training.

    Use in order: construct (places at once), `start_schedule`, load state and commit
    `placement`, `join`. Times are seconds of `time.perf_counter`; `sealed_at` is their zero.
    """

    window: Window
    topology: Topology
    cost: CostModel
    carried: Placement
    policy: str
    options: PlannerOptions
    deadline_seconds: float
    calls: PlannerCalls = field(default_factory=PlannerCalls)
    sealed_at: float = field(init=False)
    placed_at: float = field(init=False)
    schedule_started_at: float = field(init=False)
    schedule_ended_at: float | None = field(init=False, default=None)
    fallback: str | None = field(init=False, default=None)
    _placed: PlacementResult = field(init=False)
    _scheduled: RowsResult | None = field(init=False, default=None)
    _error: BaseException | None = field(init=False, default=None)
    _thread: threading.Thread | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.sealed_at = time.perf_counter()
        try:
            self._placed = self.calls.place(
                self.window, self.topology, self.carried, self.policy, self.options
            )
            _check_successor(self._placed.placement, self.carried)
        except Exception as error:
            self._fall_back(f"placement failed: {error}")
            self._placed = place(self.window, self.topology, self.carried, "base", self.options)
        self.placed_at = time.perf_counter()

    @property
    def placement(self) -> Placement:
        """The placement to commit; the carried one if placing failed."""
        return self._placed.placement

    def start_schedule(self) -> None:
        """Search rows on a thread; the kernels release the GIL."""
        self.schedule_started_at = time.perf_counter()
        self._thread = threading.Thread(target=self._search, name="routepack-schedule", daemon=True)
        self._thread.start()

    def join(self) -> Plan:
        """Return the validated plan, waiting for rows until the deadline after sealing.

        Never raises for a planner's fault: base rows on the committed placement replace its rows,
        `fallback` says why, and a warning is logged.
        """
        if self._thread is None:
            raise RuntimeError("join() before start_schedule()")
        left = self.sealed_at + self.deadline_seconds - time.perf_counter()
        self._thread.join(timeout=max(0.0, left))
        scheduled, late = self._scheduled, self._thread.is_alive()
        if late:
            self._fall_back(f"rows were not ready {self.deadline_seconds:g} s after sealing")
        elif self._error is not None:
            self._fall_back(f"scheduling failed: {self._error}")
        elif scheduled is not None and self.fallback is None:
            try:
                return self._assemble(scheduled, self.policy)
            except Exception as error:
                self._fall_back(f"the plan does not validate: {error}")
        return self._assemble(self._base_rows(), self.policy)

    def _search(self) -> None:
        try:
            self._scheduled = self.calls.schedule(
                self.window, self.topology, self.cost, self.placement, self.policy, self.options
            )
        except BaseException as error:
            self._error = error
        self.schedule_ended_at = time.perf_counter()

    def _base_rows(self) -> RowsResult:
        return schedule(self.window, self.topology, self.cost, self.placement, "base", self.options)

    def _assemble(self, scheduled: RowsResult, policy: str) -> Plan:
        return assemble_plan(
            self.window,
            self.topology,
            self.cost,
            self.carried,
            policy,
            self.options,
            self._placed,
            scheduled,
        )

    def _fall_back(self, reason: str) -> None:
        if self.fallback is None:
            self.fallback = reason
            logger.warning(
                "window %d: %s; training goes on with base rows and the current placement",
                self.window.window_id,
                reason,
            )


def _check_successor(placement: Placement, carried: Placement) -> None:
    if placement.expert_of_slot.shape != carried.expert_of_slot.shape:
        raise ValueError(
            f"placement covers {placement.expert_of_slot.shape}, the layout has "
            f"{carried.expert_of_slot.shape}"
        )
    if placement.version not in (carried.version, carried.version + 1):
        raise ValueError(
            f"placement has version {placement.version}, the carried one {carried.version}"
        )
