"""The number of rows of least predicted 1F1B time, between R_min and 2 R_min (`rows: makespan`).

The paper takes max(R_min, 2 PP). With PP > 1 that floor can double the rows of a small window, and
the fewest rows are not the fastest either: more rows shrink the bubble, fewer rows shrink the sum
of row maxima. Each candidate count is judged by a quick pairing of its FFD cells.
"""

from __future__ import annotations

import numpy as np

from planner.cost import CostModel
from planner.packing.global_rows import global_ffd_rows
from planner.packing.row_count import RowCount, most_rows
from planner.pipeline_sim import makespan
from planner.search.pair_anneal import PAIR_REWARDS, PAIR_WINDOWS
from planner.search.pair_start import pair_cells
from planner.search.rescore import Problem, cells_to_internal, layout_of, problem_of
from planner.search.row_order import valley
from planner.topology import Topology

MOST_CANDIDATES = 12


def candidate_rows(counted: RowCount, num_trajectories: int, topology: Topology) -> list[int]:
    """Row counts to judge: multiples from R_min to 2 R_min, no cell empty, evenly thinned."""
    highest = min(2 * counted.value, most_rows(num_trajectories, topology))
    counts = list(range(counted.value, highest + 1, topology.row_multiple))
    if topology.pp == 1:
        return counts[:1]
    if len(counts) > MOST_CANDIDATES:
        picks = np.linspace(0, len(counts) - 1, MOST_CANDIDATES).round().astype(int)
        counts = [counts[k] for k in picks]
    return counts


def ranked_row_counts(
    length: np.ndarray, q: np.ndarray, counted: RowCount, topology: Topology, cost: CostModel
) -> list[int]:
    """Candidate row counts by predicted time, for length [trajectory], q [trajectory, layer, rank].

    Ties go to fewer rows.
    """
    candidates = candidate_rows(counted, len(length), topology)
    if len(candidates) == 1:
        return candidates
    predicted = []
    for num_rows in candidates:
        first = global_ffd_rows(length, topology, counted, num_rows)
        problem = problem_of(length, q, num_rows, topology, cost)
        cell = cells_to_internal(first.cell, topology)
        scale = layout_of(problem, cell).row_cost.mean()
        reward = PAIR_REWARDS[0] * scale
        paired = pair_cells(problem, cell, window=PAIR_WINDOWS[0], token_reward=reward)
        times = [valley_makespan(problem, layout, topology) for layout in (paired, cell)]
        predicted.append((min(times), num_rows))
    return [num_rows for _, num_rows in sorted(predicted)]


def valley_makespan(problem: Problem, cell: np.ndarray, topology: Topology) -> float:
    """Predicted time of internal cells with their rows in valley order."""
    layout = layout_of(problem, cell)
    row_cost = layout.row_cost.reshape(problem.num_rows, topology.num_shards)
    return makespan(row_cost, topology, valley(row_cost.max(axis=1)))
