"""One window under one policy: place, schedule, report (`planner.policies` lists the policies)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from planner.cost import CostModel
from planner.options import PlannerOptions
from planner.placement import Placement
from planner.placing.place import PlacementResult, place
from planner.plan import Plan
from planner.scheduling import RowsResult, base_joint_cost, schedule
from planner.score import Score, score
from planner.topology import Topology
from planner.window import Window

__all__ = [
    "PlacementResult",
    "PlannerOptions",
    "RowsResult",
    "Score",
    "assemble_plan",
    "make_plan",
    "place",
    "schedule",
    "score",
]


def make_plan(
    window: Window,
    topology: Topology,
    cost: CostModel,
    carried: Placement,
    policy: str,
    options: PlannerOptions,
    copies: np.ndarray | None = None,
) -> Plan:
    """Places, schedules and reports one window; the plan passes `Plan.validate`.

    copies are those of `schedule`; they must belong to the placement that `place` returns. In
    makespan mode full also searches rows under the carried placement, and moves nothing where they
    are predicted as fast: with a budget in proposals it is never slower than reschedule or reroute.
    """
    placed = place(window, topology, carried, policy, options)
    compares = options.rows == "makespan" and not (
        options.max_rank_tokens or options.copy_weight or copies is not None
    )
    if policy == "full" and compares and placed.num_moved:
        placed, scheduled = _moved_or_not(window, topology, cost, carried, options, placed)
    else:
        scheduled = schedule(window, topology, cost, placed.placement, policy, options, copies)
    return assemble_plan(window, topology, cost, carried, policy, options, placed, scheduled)


def _moved_or_not(
    window: Window,
    topology: Topology,
    cost: CostModel,
    carried: Placement,
    options: PlannerOptions,
    placed: PlacementResult,
) -> tuple[PlacementResult, RowsResult]:
    """The faster of reschedule, and of the new placement with rows sought from reschedule's.

    A budget in seconds is shared by the two searches; one in proposals is that of each, so that the
    first is exactly what reschedule finds.
    """
    if options.budget_seconds is not None:
        options = replace(options, budget_seconds=options.budget_seconds / 2)
    stay = schedule(window, topology, cost, carried, "reschedule", options)
    move = schedule(
        window,
        topology,
        cost,
        placed.placement,
        "full",
        options,
        counted=stay.counted,
        known=(stay.rows,),
    )
    seconds = stay.seconds + move.seconds
    proposals = stay.report["proposals"] + move.report["proposals"]
    search_seconds = stay.report["search_seconds"] + move.report["search_seconds"]
    if stay.report["makespan"] <= move.report["makespan"]:
        unmoved = place(window, topology, carried, "reschedule", options)
        placed = replace(unmoved, stop_reason="carried_is_faster", seconds=placed.seconds)
        move = stay
    report = move.report | {"proposals": proposals, "search_seconds": search_seconds}
    return placed, replace(move, report=report, seconds=seconds)


def assemble_plan(
    window: Window,
    topology: Topology,
    cost: CostModel,
    carried: Placement,
    policy: str,
    options: PlannerOptions,
    placed: PlacementResult,
    scheduled: RowsResult,
) -> Plan:
    """The plan of a placement and rows that were made apart, with its report, validated."""
    report = dict(scheduled.report)
    report["moved_experts"] = float(placed.num_moved)
    report["cv_max"] = placed.cv_max
    report["cv_bound"] = placed.cv_bound
    report["cross_node_moves"] = float(placed.num_cross_node)
    report["added_remote_tokens"] = float(placed.added_remote_tokens)
    report["predicted_saving"] = placed.predicted_saving
    report["predicted_move_cost"] = placed.predicted_cost
    report["capture_coverage"] = float(1.0 - window.estimated.mean())
    report["base_joint_cost"] = base_joint_cost(window, topology, cost, options, scheduled.counted)
    report["place_seconds"] = placed.seconds
    report["schedule_seconds"] = scheduled.seconds
    plan = Plan(
        policy=policy,
        window_id=window.window_id,
        layout_version=carried.version,
        placement=placed.placement,
        rows=scheduled.rows,
        report=report,
        notes={"stop_reason": placed.stop_reason},
    )
    plan.validate(window, topology, carried)
    return plan
