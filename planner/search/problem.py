"""From a window to the search's problem and its first layout, at the paper's row count."""

from __future__ import annotations

import numpy as np

from planner.cost import CostModel
from planner.packing.global_rows import global_ffd_rows
from planner.packing.row_count import most_rows, row_count
from planner.placement import Placement
from planner.score import rank_demand
from planner.search.rescore import Problem, cells_to_internal, problem_of
from planner.topology import Topology
from planner.window import Window


def search_problem(
    window: Window, topology: Topology, cost: CostModel, placement: Placement | None = None
) -> tuple[Problem, np.ndarray] | None:
    """(problem, internal cells of global FFD) at R_min; None when a cell would stay empty.

    For benches and tests that call an engine directly; placement defaults to identity.
    """
    counted = row_count(window.length, topology)
    if counted.value > most_rows(window.num_trajectories, topology):
        return None
    if placement is None:
        placement = Placement.identity(window.num_layers, window.num_experts, topology.num_ep_ranks)
    rows = global_ffd_rows(window.length, topology, counted, counted.value)
    q = rank_demand(window.demand, placement)
    problem = problem_of(window.length, q, rows.num_rows, topology, cost)
    return problem, cells_to_internal(rows.cell, topology)
