"""The six policies: which placement and which rows a window gets, in one call each.

off and observe run slime's schedule, base the paper's DP-local FFD; reroute changes only the
placement, reschedule only the rows, full both (Section 4.2).
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass

import numpy as np

from planner.base_rows import dp_local_ffd
from planner.cost import CostModel
from planner.global_rows import global_ffd_rows
from planner.greedy_placement import (
    LIMIT_REACHED,
    NO_IMPROVING_SWAP,
    TARGET_MET,
    repair_layers,
)
from planner.pair_anneal import pair_anneal
from planner.placement import Placement, coefficient_of_variation, rank_load
from planner.plan import Plan
from planner.rescore import cells_to_internal, problem_of, rows_of
from planner.row_count import (
    RowCount,
    raised_to_pipeline_floor,
    row_count,
    too_few,
    trailing_groups_to_drop,
)
from planner.rows import Rows
from planner.score import Score, rank_demand, score, score_rank_demand
from planner.slime_rows import slime_rows
from planner.topology import Topology
from planner.window import Window

__all__ = [
    "POLICIES",
    "PlacementResult",
    "PlannerOptions",
    "RowsResult",
    "Score",
    "make_plan",
    "place",
    "schedule",
    "score",
]

POLICIES = ("off", "observe", "base", "reschedule", "reroute", "full")
MOVES_EXPERTS = ("reroute", "full")
SEARCHES_ROWS = ("reschedule", "full")

_CHOICES = {
    "rows": ("makespan", "paper"),
    "rows_from": ("dp_local_ffd", "slime"),
    "placement": ("greedy", "few_moves"),
    "stop": ("cv", "net_benefit"),
    "engine": ("pair_anneal", "population_annealing"),
    "long_trajectory": ("warn", "error"),
    "too_few": ("drop", "error"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannerOptions:
    """Every knob of the planner. Raises ValueError on a value that is not listed."""

    rows: str = "makespan"
    """`makespan`: the number of rows by predicted 1F1B time; `paper`: max(R_min, 2 PP)."""
    rows_from: str = "dp_local_ffd"
    """Rows that reroute keeps: `dp_local_ffd` or `slime`."""
    placement: str = "greedy"
    """`greedy`: exact best swaps; `few_moves`: cyclic repair first, fewest experts moved."""
    stop: str = "cv"
    """`cv`: repair until the rank-load CV target; `net_benefit`: while a swap pays for its move."""
    cv_target: float = 5e-4
    max_moves: int | None = None
    """Most experts moved by one placement, over all layers; None: no limit."""
    engine: str = "pair_anneal"
    budget_seconds: float | None = 1.0
    """Wall time of one search; None: no limit (then give budget_proposals)."""
    budget_proposals: int | None = None
    """Proposals of one search over all threads; deterministic when budget_seconds is None."""
    num_threads: int = 2
    seed: int = 0
    shard_size: int = 8
    """Trajectories of one GRPO group: the unit that base deals to DP slots."""
    slime_balance_data: bool = False
    """Whether slime runs with --balance-data (Karmarkar-Karp over the DP slots)."""
    long_trajectory: str = "warn"
    """A trajectory above the cap gets a cell of its own (`warn`) or is refused (`error`)."""
    too_few: str = "drop"
    """Too few trajectories for rows without an empty cell: drop trailing groups, or refuse."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"PlannerOptions.{name}: got {getattr(self, name)!r}, expected one of {choices}"
                )
        for name in ("num_threads", "shard_size"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"PlannerOptions.{name}: got {getattr(self, name)}, expected at least 1"
                )
        if self.budget_seconds is None and self.budget_proposals is None:
            raise ValueError(
                "PlannerOptions: budget_seconds and budget_proposals are both None; give one"
            )
        for name in ("budget_seconds", "budget_proposals", "cv_target", "max_moves"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"PlannerOptions.{name}: got {value}, expected at least 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementResult:
    """A placement and why the repair stopped."""

    placement: Placement
    num_moved: int
    """Experts that change their slot, over all layers."""
    cv_max: float
    """Largest rank-load CV of any layer, after the repair."""
    cv_before: float
    """The same under the carried placement."""
    stop_reason: str
    """`not_placed`, `cv_target`, `no_improving_swap` or `max_moves`: the worst over the layers."""
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsResult:
    """Rows and the figures of the search that made them."""

    rows: Rows
    report: dict[str, float]
    seconds: float


def check_policy(policy: str) -> None:
    if policy not in POLICIES:
        raise ValueError(f"policy: got {policy!r}, expected one of {POLICIES}")


def check_sizes(window: Window, topology: Topology, placement: Placement) -> None:
    """Raises ValueError when window, topology and placement do not describe one job."""
    expected = (window.num_layers, window.num_experts)
    if placement.expert_of_slot.shape != expected:
        raise ValueError(
            f"placement: covers [layer, expert] {placement.expert_of_slot.shape}, the window has "
            f"{expected}"
        )
    if placement.num_ep_ranks != topology.num_ep_ranks:
        raise ValueError(
            f"placement: {placement.num_ep_ranks} EP ranks, the topology has {topology.num_ep_ranks}"
        )


def place(
    window: Window, topology: Topology, carried: Placement, policy: str, options: PlannerOptions
) -> PlacementResult:
    """Repairs the carried placement for the window's demand (Section 3.2); takes milliseconds.

    Policies that do not move experts return `carried` itself.
    """
    start = time.perf_counter()
    check_policy(policy)
    check_sizes(window, topology, carried)
    load = window.expert_load
    cv_before = float(coefficient_of_variation(rank_load(load, carried)).max(initial=0.0))
    placement, reason = carried, "not_placed"
    if policy in MOVES_EXPERTS:
        owner = carried.owner.astype(np.int64)
        swaps = np.zeros(window.num_layers, np.int64)
        reasons = np.full(window.num_layers, TARGET_MET)
        limit = np.iinfo(np.int64).max if options.max_moves is None else options.max_moves // 2
        repair_layers(load, owner, topology.num_ep_ranks, options.cv_target, limit, swaps, reasons)
        placement = carried.with_owner(owner)
        reason = "cv_target"
        if (reasons == NO_IMPROVING_SWAP).any():
            reason = "no_improving_swap"
        if (reasons == LIMIT_REACHED).any():
            reason = "max_moves"
    cv_max = float(coefficient_of_variation(rank_load(load, placement)).max(initial=0.0))
    return PlacementResult(
        placement=placement,
        num_moved=placement.num_moved(carried),
        cv_max=cv_max,
        cv_before=cv_before,
        stop_reason=reason,
        seconds=time.perf_counter() - start,
    )


def schedule(
    window: Window,
    topology: Topology,
    cost: CostModel,
    placement: Placement,
    policy: str,
    options: PlannerOptions,
) -> RowsResult:
    """The rows of a window under a fixed placement; the GIL is free during the search.

    Trajectories that cannot be run without an empty cell are dropped in whole trailing groups, or
    refused with ValueError, as `options.too_few` says.
    """
    start = time.perf_counter()
    check_policy(policy)
    check_sizes(window, topology, placement)
    _check_long(window, topology, options)
    num_dropped = trailing_groups_to_drop(window.length, window.group, topology)
    if num_dropped and options.too_few == "error":
        raise too_few(window.length, topology)
    num_kept = window.num_trajectories - num_dropped
    length = window.length[:num_kept]
    q = rank_demand(window.demand[:num_kept], placement)
    counted = row_count(length, topology)
    figures = {
        "rows_bound": float(counted.bound),
        "rows_certified": float(counted.certified),
    }
    if policy in SEARCHES_ROWS:
        rows, more = _search(length, q, counted, topology, cost, options)
        figures |= more
    else:
        rows = _fixed_rows(length, window.window_id, counted, topology, cost, policy, options)
    report = _row_figures(length, q, rows, topology, cost) | figures
    report["dropped"] = float(num_dropped)
    if num_dropped:
        cell = np.concatenate([rows.cell, np.full(num_dropped, -1, np.int32)])
        rows = Rows(cell=cell, num_rows=rows.num_rows, num_dp_slots=rows.num_dp_slots)
    return RowsResult(rows=rows, report=report, seconds=time.perf_counter() - start)


def _check_long(window: Window, topology: Topology, options: PlannerOptions) -> None:
    long = np.flatnonzero(window.length > topology.capacity)
    if not len(long):
        return
    message = (
        f"{len(long)} trajectories are longer than the cell capacity of {topology.capacity} tokens "
        f"(trajectory {long[0]}: {window.length[long[0]]}); each gets a cell of its own. Raise "
        "max_tokens_per_gpu to fit them"
    )
    if options.long_trajectory == "error":
        raise ValueError(message)
    warnings.warn(message, stacklevel=3)


def _fixed_rows(
    length: np.ndarray,
    window_id: int,
    counted: RowCount,
    topology: Topology,
    cost: CostModel,
    policy: str,
    options: PlannerOptions,
) -> Rows:
    """Rows of the policies that do not search; global FFD where theirs would leave a cell empty."""
    if policy in ("off", "observe") or (policy == "reroute" and options.rows_from == "slime"):
        rows = slime_rows(
            length,
            topology,
            balance_data=options.slime_balance_data,
            workload=cost.dense_work(length, topology.capacity) if cost.stages else None,
        )
    else:
        rows = dp_local_ffd(
            length,
            window_id,
            topology,
            shard_size=options.shard_size,
            pipeline_floor=options.rows == "paper",
        )
    return rows or global_ffd_rows(length, topology, counted, counted.value)


def _search(
    length: np.ndarray,
    q: np.ndarray,
    counted: RowCount,
    topology: Topology,
    cost: CostModel,
    options: PlannerOptions,
) -> tuple[Rows, dict[str, float]]:
    """Joint rescheduling at a fixed number of rows (Section 4)."""
    num_rows = raised_to_pipeline_floor(counted.value, len(length), topology)
    first = global_ffd_rows(length, topology, counted, num_rows)
    problem = problem_of(length, q, num_rows, topology, cost)
    found = pair_anneal(
        problem,
        [cells_to_internal(first.cell, topology)],
        seed=options.seed,
        num_threads=options.num_threads,
        budget_seconds=options.budget_seconds,
        budget_proposals=options.budget_proposals,
    )
    rows = rows_of(found.cell, problem, topology)
    initial = score_rank_demand(length, q, first, topology, cost)
    final = score_rank_demand(length, q, rows, topology, cost)
    if final.key > initial.key:  # equal but for rounding
        rows, final = first, initial
    bound = initial.lower_bound
    room = initial.max_shard - bound
    saved = initial.max_shard - final.max_shard
    return rows, {
        "J0_over_B": initial.max_shard / bound if bound else 1.0,
        "excess_removed": saved / room if room > 1e-12 else 0.0,
        "reduction": saved / initial.max_shard if initial.max_shard else 0.0,
        "proposals": float(found.num_proposals),
        "search_seconds": found.seconds,
    }


def _row_figures(
    length: np.ndarray, q: np.ndarray, rows: Rows, topology: Topology, cost: CostModel
) -> dict[str, float]:
    figures = score_rank_demand(length, q, rows, topology, cost)
    over = figures.max_shard / figures.lower_bound if figures.lower_bound else 1.0
    return {
        "J0_over_B": over,
        "J1_over_B": over,
        "excess_removed": 0.0,
        "reduction": 0.0,
        "rows": float(rows.num_rows),
        "token_utilization": figures.token_utilization,
        "global_excess": figures.global_excess,
        "row_local_excess": figures.row_local_excess,
        "joint_cost": figures.max_shard,
    }


def make_plan(
    window: Window,
    topology: Topology,
    cost: CostModel,
    carried: Placement,
    policy: str,
    options: PlannerOptions,
) -> Plan:
    """Places, schedules and reports one window; the plan passes `Plan.validate`."""
    placed = place(window, topology, carried, policy, options)
    scheduled = schedule(window, topology, cost, placed.placement, policy, options)
    return assemble_plan(window, topology, cost, carried, policy, options, placed, scheduled)


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
    report["capture_coverage"] = float(1.0 - window.estimated.mean())
    report["base_joint_cost"] = base_joint_cost(window, topology, cost, options)
    report["place_seconds"] = placed.seconds
    report["schedule_seconds"] = scheduled.seconds
    plan = Plan(
        policy=policy,
        window_id=window.window_id,
        layout_version=carried.version,
        placement=placed.placement,
        rows=scheduled.rows,
        report=report,
    )
    plan.validate(window, topology, carried)
    return plan


def base_joint_cost(
    window: Window, topology: Topology, cost: CostModel, options: PlannerOptions
) -> float:
    """U of the paper's base: DP-local FFD rows under identity placement, same trajectories kept."""
    num_dropped = trailing_groups_to_drop(window.length, window.group, topology)
    kept = window.num_trajectories - num_dropped
    length = window.length[:kept]
    counted = row_count(length, topology)
    rows = _fixed_rows(length, window.window_id, counted, topology, cost, "base", options)
    identity = Placement.identity(window.num_layers, window.num_experts, topology.num_ep_ranks)
    q = rank_demand(window.demand[:kept], identity)
    return score_rank_demand(length, q, rows, topology, cost).max_shard
