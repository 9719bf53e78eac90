"""The rows of one window under a fixed placement, for every policy (Sections 3.1 and 4)."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass

import numpy as np

from planner.communication import traffic
from planner.cost import CostModel
from planner.options import SEARCHES_ROWS, PlannerOptions, check_policy, check_sizes
from planner.packing.base_rows import dp_local_ffd
from planner.packing.global_rows import global_ffd_rows
from planner.packing.row_count import (
    RowCount,
    count_kept,
    raised_to_pipeline_floor,
    too_few,
)
from planner.packing.slime_rows import slime_rows
from planner.pipeline_sim import makespan
from planner.placement import Placement
from planner.rows import Rows
from planner.score import rank_demand, row_costs, score_rank_demand
from planner.search.found import Found
from planner.search.pair_anneal import pair_anneal
from planner.search.population_annealing import population_annealing
from planner.search.rescore import Problem, cells_to_internal, problem_of, rows_of
from planner.search.row_choice import ranked_row_counts, valley_makespan
from planner.search.row_order import best_row_order, reordered, valley
from planner.topology import Topology
from planner.window import Window

TRIED_COUNTS, TRIAL_SHARE = 3, 0.1
"""Row counts that get a trial search in makespan mode, and each trial's share of the budget."""
FINAL_COUNTS = 2
"""Row counts, the best of the trials, that share the rest of the budget."""
ORDERED_LAYOUTS = 3
"""Layouts, the fastest in valley order, whose row order is searched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsResult:
    """Rows and the figures of the search that made them."""

    rows: Rows
    report: dict[str, float]
    seconds: float
    counted: tuple[int, RowCount] | None = None
    """Of `count_kept`, for whoever needs it again."""


def schedule(
    window: Window,
    topology: Topology,
    cost: CostModel,
    placement: Placement,
    policy: str,
    options: PlannerOptions,
    copies: np.ndarray | None = None,
    counted: tuple[int, RowCount] | None = None,
    known: tuple[Rows, ...] = (),
) -> RowsResult:
    """The rows of a window under a fixed placement; the GIL is free during the search.

    copies [trajectory, layer, EP rank] are deduplicated token copies (`communication.fan_out`) of
    this placement; they are reported, and enter the search with `options.copy_weight`.
    counted is `count_kept` of the window, when at hand. Searched rows are never predicted slower
    than those of slime, of base, or of `known` (makespan mode; in paper mode, than rows of slime or
    base that are as many); with `max_rank_tokens` or `copy_weight` the search's own are kept.

    Trajectories that cannot be run without an empty cell are dropped in whole trailing groups, or
    refused with ValueError, as `options.too_few` says.
    """
    start = time.perf_counter()
    check_policy(policy)
    check_sizes(window, topology, placement)
    _check_long(window, topology, options)
    if counted is None:
        counted = count_kept(window.length, window.group, topology)
    num_kept, packed = counted
    num_dropped = window.num_trajectories - num_kept
    if num_dropped and options.too_few == "error":
        raise too_few(window.length, topology)
    length = window.length[:num_kept]
    q = rank_demand(window.demand[:num_kept], placement)
    figures = {
        "rows_bound": float(packed.bound),
        "rows_certified": float(packed.certified),
    }
    if policy in SEARCHES_ROWS:
        if copies is not None:
            copies = copies[:num_kept]
        others = [_kept_rows(rows, num_kept) for rows in known]
        for fixed in ("off", "base"):
            others.append(
                _fixed_rows(length, window.window_id, packed, topology, cost, fixed, options)
            )
        rows, more = _search(length, q, packed, topology, cost, options, copies, others)
        figures |= more
    else:
        rows = _fixed_rows(length, window.window_id, packed, topology, cost, policy, options)
    report = _row_figures(length, q, rows, topology, cost) | figures
    peak, above = rank_token_peak(q, rows, topology, options.max_rank_tokens)
    report["rank_tokens_max"] = float(peak)
    report["rank_tokens_above_limit"] = float(above)
    if copies is not None:
        report["copy_remote"] = (found := traffic(copies, rows, topology)).remote
        report["copy_peak"], report["copy_efficiency"] = found.peak, found.efficiency
    report["dropped"] = float(num_dropped)
    if num_dropped:
        cell = np.concatenate([rows.cell, np.full(num_dropped, -1, np.int32)])
        rows = Rows(cell=cell, num_rows=rows.num_rows, num_dp_slots=rows.num_dp_slots)
    seconds = time.perf_counter() - start
    return RowsResult(rows=rows, report=report, seconds=seconds, counted=counted)


def _kept_rows(rows: Rows, num_kept: int) -> Rows:
    """Rows of the first num_kept trajectories."""
    return Rows(cell=rows.cell[:num_kept], num_rows=rows.num_rows, num_dp_slots=rows.num_dp_slots)


def rank_token_peak(
    q: np.ndarray, rows: Rows, topology: Topology, limit: int | None
) -> tuple[int, int]:
    """Most routed tokens of one EP rank in a row and layer, and how often above `limit`."""
    peak = above = 0
    for slots in topology.edp_shards:
        for row in range(rows.num_rows):
            members = np.concatenate([rows.trajectories(row, slot) for slot in slots])
            load = -(-q[members].sum(axis=0, dtype=np.int64) // topology.ep_groups_per_shard)
            peak = max(peak, int(load.max(initial=0)))
            above += int((load > limit).sum()) if limit is not None else 0
    return peak, above


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
    copies: np.ndarray | None,
    others: list[Rows],
) -> tuple[Rows, dict[str, float]]:
    """Joint rescheduling at a fixed number of rows (Section 4).

    The other rows are taken as they are where they are predicted faster; in makespan mode they are
    seeds too where their number agrees.
    """
    budget = (options.budget_seconds, options.budget_proposals)
    judged = not (options.max_rank_tokens or options.copy_weight)
    seeding: list[Rows] = []
    if options.rows == "paper":
        counts = [raised_to_pipeline_floor(counted.value, len(length), topology)]
    else:
        counts = ranked_row_counts(length, q, counted, topology, cost)[:TRIED_COUNTS]
        seeding = others

    def search(num_rows: int, seeds: list[np.ndarray], share: float) -> tuple[Problem, Found]:
        problem = problem_of(
            length,
            q,
            num_rows,
            topology,
            cost,
            copies=copies,
            copy_weight=options.copy_weight,
            limit=options.max_rank_tokens,
        )
        engine = pair_anneal if options.engine == "pair_anneal" else population_annealing
        first = global_ffd_rows(length, topology, counted, num_rows)
        layouts = [first, *(rows for rows in seeding if rows.num_rows == num_rows)]
        found = engine(
            problem,
            [cells_to_internal(rows.cell, topology) for rows in layouts] + seeds,
            seed=options.seed,
            num_threads=options.num_threads,
            budget_seconds=None if budget[0] is None else budget[0] * share,
            budget_proposals=None if budget[1] is None else round(budget[1] * share),
        )
        return problem, found

    tried: list[tuple[Problem, Found]] = []
    finals: list[tuple[int, list[np.ndarray]]] = [(counts[0], [])]
    if len(counts) > 1:
        tried = [search(count, [], TRIAL_SHARE) for count in counts]
        times = [valley_makespan(problem, found.cell, topology) for problem, found in tried]
        best = np.argsort(times, kind="stable")[: FINAL_COUNTS if judged else 1]
        finals = [(counts[k], [tried[k][1].cell]) for k in best]
    share = (1.0 - TRIAL_SHARE * len(tried)) / len(finals)
    made = [search(num_rows, seeds, share) for num_rows, seeds in finals]
    first = global_ffd_rows(length, topology, counted, finals[0][0])
    initial = score_rank_demand(length, q, first, topology, cost)
    rows = rows_of(made[0][1].cell, made[0][0], topology)
    if judged and options.rows == "makespan":
        layouts = [rows_of(found.cell, problem, topology) for problem, found in made + tried]
        rows = _fastest([*layouts, *others], length, q, topology, cost, options)
    elif judged:
        likely = [rows, *(other for other in others if other.num_rows == rows.num_rows)]
        rows = min(likely, key=lambda x: score_rank_demand(length, q, x, topology, cost).key)
    final = score_rank_demand(length, q, rows, topology, cost)
    bound = initial.lower_bound
    room = initial.max_shard - bound
    saved = initial.max_shard - final.max_shard
    return rows, {
        "J0_over_B": initial.max_shard / bound if bound else 1.0,
        "excess_removed": saved / room if room > 1e-12 else 0.0,
        "reduction": saved / initial.max_shard if initial.max_shard else 0.0,
        "proposals": float(sum(found.num_proposals for _, found in made + tried)),
        "search_seconds": sum(found.seconds for _, found in made + tried),
    }


def _fastest(
    candidates: list[Rows],
    length: np.ndarray,
    q: np.ndarray,
    topology: Topology,
    cost: CostModel,
    options: PlannerOptions,
) -> Rows:
    """The rows of least predicted makespan, the likely ones in their best order; first on ties."""
    costs = [np.add(*row_costs(length, q, rows, topology, cost)) for rows in candidates]
    times = []
    for row_cost in costs:
        orders = (np.arange(len(row_cost)), valley(row_cost.max(axis=1)))
        times.append(min(makespan(row_cost, topology, order) for order in orders))
    best, least = candidates[0], float("inf")
    for k in np.argsort(times, kind="stable")[:ORDERED_LAYOUTS]:
        order = best_row_order(costs[k], topology, options.seed)
        time_needed = makespan(costs[k], topology, order)
        if time_needed < least * (1 - 1e-12):
            best, least = reordered(candidates[k], order), time_needed
    return best


def _row_figures(
    length: np.ndarray, q: np.ndarray, rows: Rows, topology: Topology, cost: CostModel
) -> dict[str, float]:
    figures = score_rank_demand(length, q, rows, topology, cost)
    row_cost = np.add(*row_costs(length, q, rows, topology, cost))
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
        "makespan": makespan(row_cost, topology),
    }


def base_joint_cost(
    window: Window,
    topology: Topology,
    cost: CostModel,
    options: PlannerOptions,
    counted: tuple[int, RowCount] | None = None,
) -> float:
    """U of the paper's base: DP-local FFD rows under identity placement, same trajectories kept.

    counted is `count_kept` of the window, when at hand.
    """
    kept, packed = counted or count_kept(window.length, window.group, topology)
    length = window.length[:kept]
    rows = _fixed_rows(length, window.window_id, packed, topology, cost, "base", options)
    identity = Placement.identity(window.num_layers, window.num_experts, topology.num_ep_ranks)
    q = rank_demand(window.demand[:kept], identity)
    return score_rank_demand(length, q, rows, topology, cost).max_shard
