"""What the page draws of a plan, as plain JSON values for a command's `details`."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.cost import CostModel
from planner.placement import Placement, rank_load
from planner.plan import Plan
from planner.policy import PlannerOptions, make_plan
from planner.score import rank_demand, row_costs
from planner.topology import Topology
from planner.window import Window


def rank_load_detail(window: Window, before: Placement, after: Placement) -> dict[str, Any]:
    """`details["rank_load"]`: routed tokens [layer][EP rank] under two placements."""
    return {
        "window": window.window_id,
        "layer_numbers": list(window.layer_numbers),
        "before": rank_load(window.expert_load, before).tolist(),
        "after": rank_load(window.expert_load, after).tolist(),
    }


def rows_detail(plan: Plan, window: Window, topology: Topology, cost: CostModel) -> dict[str, Any]:
    """`details["rows"][policy]`: cells [row, slot, work, lengths], A_rg, E_rg."""
    q = rank_demand(window.demand, plan.placement)
    dense, expert = row_costs(window.length, q, plan.rows, topology, cost)
    cells = []
    for row in range(plan.rows.num_rows):
        for slot in range(plan.rows.num_dp_slots):
            length = window.length[plan.rows.trajectories(row, slot)]
            work = _cell_work(length, topology, cost)
            cells.append([row, slot, round(work, 4), length.tolist()])
    return {
        "window": window.window_id,
        "capacity": topology.capacity,
        "edp_shards": [list(shard) for shard in topology.edp_shards],
        "cells": cells,
        "dense": np.round(dense, 4).tolist(),
        "expert": np.round(expert, 4).tolist(),
    }


def rows_beside_off(
    plan: Plan, window: Window, topology: Topology, cost: CostModel, identity: Placement
) -> dict[str, Any]:
    """`details["rows"]` of a plan, and of slime's own schedule of the same window before it.

    The schedule of `off` stands on identity placement; it is left out where slime would stop for
    want of trajectories.
    """
    found = {plan.policy: rows_detail(plan, window, topology, cost)}
    if plan.policy == "off":
        return found
    options = PlannerOptions(budget_seconds=0.01)
    try:
        off = make_plan(window, topology, cost, identity, "off", options)
    except ValueError:
        return found
    return {"off": rows_detail(off, window, topology, cost), **found}


def _cell_work(length: np.ndarray, topology: Topology, cost: CostModel) -> float:
    return float(cost.dense_work(length, topology.capacity).sum())
