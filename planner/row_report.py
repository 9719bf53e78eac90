"""The figures of rows, whoever made them: cost, excess, utilization, copies (Section 4.2)."""

from __future__ import annotations

import numpy as np

from planner.communication import traffic
from planner.cost import CostModel
from planner.pipeline_sim import makespan
from planner.rows import Rows
from planner.score import row_costs, score_rank_demand
from planner.topology import Topology


def row_figures(
    length: np.ndarray,
    q: np.ndarray,
    rows: Rows,
    topology: Topology,
    cost: CostModel,
    *,
    max_rank_tokens: int | None = None,
    copies: np.ndarray | None = None,
) -> dict[str, float]:
    """Report of rows for length [trajectory], q and copies [trajectory, layer, EP rank]."""
    figures = score_rank_demand(length, q, rows, topology, cost)
    row_cost = np.add(*row_costs(length, q, rows, topology, cost))
    over = figures.max_shard / figures.lower_bound if figures.lower_bound else 1.0
    peak, above = rank_token_peak(q, rows, topology, max_rank_tokens)
    report = {
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
        "rank_tokens_max": float(peak),
        "rank_tokens_above_limit": float(above),
    }
    if copies is not None:
        found = traffic(copies, rows, topology)
        report["copy_remote"] = found.remote
        report["copy_peak"], report["copy_efficiency"] = found.peak, found.efficiency
    return report


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
