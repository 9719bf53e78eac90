"""Joint rescheduling at a fixed placement, step by step: counts, search, order (Section 4)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.cost import CostModel
from planner.options import PlannerOptions
from planner.packing.global_rows import global_ffd_rows
from planner.packing.row_count import RowCount, raised_to_pipeline_floor
from planner.pipeline_sim import makespan
from planner.rows import Rows
from planner.score import row_costs, score_rank_demand
from planner.search.found import Found
from planner.search.pair_anneal import pair_anneal
from planner.search.population_annealing import population_annealing
from planner.search.rescore import Problem, cells_to_internal, problem_of, rows_of
from planner.search.row_choice import ranked_row_counts, valley_makespan
from planner.search.row_order import best_row_order, reordered, valley
from planner.topology import Topology

TRIED_COUNTS, TRIAL_SHARE = 3, 0.1
"""Row counts that get a trial search in makespan mode, and each trial's share of the budget."""
FINAL_COUNTS = 2
"""Row counts, the best of the trials, that share the rest of the budget."""
ORDERED_LAYOUTS = 3
"""Layouts, the fastest in valley order, whose row order is searched."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlacedWindow:
    """The trajectories of a window whose experts have a place: what every step reads."""

    length: np.ndarray
    """[trajectory] tokens."""
    q: np.ndarray
    """[trajectory, layer, EP rank] routed tokens under the placement."""
    counted: RowCount
    """R_min and its packing."""
    topology: Topology
    cost: CostModel
    options: PlannerOptions
    copies: np.ndarray | None = None
    """[trajectory, layer, EP rank] deduplicated token copies."""

    @property
    def judged(self) -> bool:
        """Whether predicted time alone decides between rows."""
        return not (self.options.max_rank_tokens or self.options.copy_weight)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Searched:
    """Layouts that searches found: the final ones, the best count first, then the trials."""

    finals: list[tuple[Problem, Found]]
    trials: list[tuple[Problem, Found]]


def row_counts(placed: PlacedWindow) -> list[int]:
    """Numbers of rows worth a search, the likeliest first: the paper's R*, or by 1F1B time."""
    if placed.options.rows == "paper":
        counted = placed.counted.value
        return [raised_to_pipeline_floor(counted, len(placed.length), placed.topology)]
    ranked = ranked_row_counts(
        placed.length, placed.q, placed.counted, placed.topology, placed.cost
    )
    return ranked[:TRIED_COUNTS]


def search_counts(placed: PlacedWindow, counts: list[int], others: list[Rows]) -> Searched:
    """Search each count a little, then the best of them with the rest of the budget.

    others: rows at hand; in makespan mode they are seeds too where their number agrees.
    """
    seeding = [] if placed.options.rows == "paper" else others
    trials: list[tuple[Problem, Found]] = []
    finals: list[tuple[int, list[np.ndarray]]] = [(counts[0], [])]
    if len(counts) > 1:
        trials = [_search(placed, count, seeding, [], TRIAL_SHARE) for count in counts]
        times = [valley_makespan(p, found.cell, placed.topology) for p, found in trials]
        best = np.argsort(times, kind="stable")[: FINAL_COUNTS if placed.judged else 1]
        finals = [(counts[k], [trials[k][1].cell]) for k in best]
    share = (1.0 - TRIAL_SHARE * len(trials)) / len(finals)
    made = [_search(placed, num_rows, seeding, seeds, share) for num_rows, seeds in finals]
    return Searched(finals=made, trials=trials)


def _search(
    placed: PlacedWindow, num_rows: int, seeding: list[Rows], seeds: list[np.ndarray], share: float
) -> tuple[Problem, Found]:
    """One search at a fixed number of rows, from global FFD, `seeding` rows and `seeds` cells."""
    options, topology = placed.options, placed.topology
    problem = problem_of(
        placed.length,
        placed.q,
        num_rows,
        topology,
        placed.cost,
        copies=placed.copies,
        copy_weight=options.copy_weight,
        limit=options.max_rank_tokens,
    )
    engine = pair_anneal if options.engine == "pair_anneal" else population_annealing
    first = global_ffd_rows(placed.length, topology, placed.counted, num_rows)
    layouts = [first, *(rows for rows in seeding if rows.num_rows == num_rows)]
    seconds, proposals = options.budget_seconds, options.budget_proposals
    found = engine(
        problem,
        [cells_to_internal(rows.cell, topology) for rows in layouts] + seeds,
        seed=options.seed,
        num_threads=options.num_threads,
        budget_seconds=None if seconds is None else seconds * share,
        budget_proposals=None if proposals is None else round(proposals * share),
    )
    return problem, found


def best_rows(placed: PlacedWindow, searched: Searched, others: list[Rows]) -> Rows:
    """The rows predicted fastest, in their best order in makespan mode; `others` compete too."""
    length, q, topology, cost = placed.length, placed.q, placed.topology, placed.cost
    problem, found = searched.finals[0]
    rows = rows_of(found.cell, problem, topology)
    if not placed.judged:
        return rows
    if placed.options.rows == "makespan":
        pairs = searched.finals + searched.trials
        layouts = [rows_of(found.cell, problem, topology) for problem, found in pairs]
        return _fastest([*layouts, *others], placed)
    likely = [rows, *(other for other in others if other.num_rows == rows.num_rows)]
    return min(likely, key=lambda x: score_rank_demand(length, q, x, topology, cost).key)


def _fastest(candidates: list[Rows], placed: PlacedWindow) -> Rows:
    """The rows of least predicted makespan, the likely ones in their best order; first on ties."""
    topology = placed.topology
    costs = [
        np.add(*row_costs(placed.length, placed.q, rows, topology, placed.cost))
        for rows in candidates
    ]
    times = []
    for row_cost in costs:
        orders = (np.arange(len(row_cost)), valley(row_cost.max(axis=1)))
        times.append(min(makespan(row_cost, topology, order) for order in orders))
    best, least = candidates[0], float("inf")
    for k in np.argsort(times, kind="stable")[:ORDERED_LAYOUTS]:
        order = best_row_order(costs[k], topology, placed.options.seed)
        time_needed = makespan(costs[k], topology, order)
        if time_needed < least * (1 - 1e-12):
            best, least = reordered(candidates[k], order), time_needed
    return best


def search_figures(placed: PlacedWindow, searched: Searched, rows: Rows) -> dict[str, float]:
    """J0 over B, eta, the reduction (Section 5.3) and what the searches took."""
    length, q, topology, cost = placed.length, placed.q, placed.topology, placed.cost
    num_rows = searched.finals[0][0].num_rows
    first = global_ffd_rows(length, topology, placed.counted, num_rows)
    initial = score_rank_demand(length, q, first, topology, cost)
    final = score_rank_demand(length, q, rows, topology, cost)
    bound = initial.lower_bound
    room = initial.max_shard - bound
    saved = initial.max_shard - final.max_shard
    made = searched.finals + searched.trials
    return {
        "J0_over_B": initial.max_shard / bound if bound else 1.0,
        "excess_removed": saved / room if room > 1e-12 else 0.0,
        "reduction": saved / initial.max_shard if initial.max_shard else 0.0,
        "proposals": float(sum(found.num_proposals for _, found in made)),
        "search_seconds": sum(found.seconds for _, found in made),
    }
