"""Compile the planner's kernels before the first window is planned.

numba compiles by type on first use and keeps the result in a cache beside the code; where that is
cold the first plan would take half a minute, which is more than a deadline should allow.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from planner.cost import CostModel
from planner.placement import Placement
from planner.policies import POLICIES
from planner.policy import PlannerOptions, make_plan
from planner.topology import Topology
from planner.window import Window


def compile_planner(cost: CostModel, options: PlannerOptions, *, pp: int) -> None:
    """Plan one small window under every kind of placement and rows.

    pp: pipeline stages of the job, which decide whether the pipeline model runs.
    """
    topology = Topology.uniform(dp=2, ep=2, capacity=64, pp=pp)
    rows = np.full(8 * max(1, pp), 20)
    demand = np.zeros((len(rows), 2, 4), np.int32)
    demand[..., :2] = rows[:, None, None]
    window = Window(window_id=0, length=rows + 1, routed_rows=rows, demand=demand, top_k=2)
    identity = Placement.identity(2, 4, 2)
    options = replace(options, budget_seconds=0.01)
    for policy in POLICIES:
        make_plan(window, topology, cost, identity, policy, options)
