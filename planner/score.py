"""The modelled cost of rows under a placement, and the bound below it (Section 3.4)."""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np

from planner.cost import CostModel
from planner.placement import Placement
from planner.rows import Rows
from planner.topology import Topology
from planner.window import Window


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Score(x; pi) of Equation 16 with the figures that are reported beside it."""

    max_shard: float
    """max_g U_g: the slowest EDP shard over the window; the joint cost."""
    sum_shards: float
    """sum_g U_g."""
    max_row: float
    """max_rg J_rg: the worst row of a shard."""
    lower_bound: float
    """B of Equation 17: no rows under this placement cost less."""
    global_excess: float
    """Section 4.2, as a fraction of uniform EP work; rows cannot change it."""
    row_local_excess: float
    """Section 4.2, as a fraction of uniform EP work."""
    token_utilization: float
    """Tokens over R * D * C."""
    dense: float
    """sum_rg A_rg."""
    expert: float
    """sum_rg E_rg."""

    @property
    def key(self) -> tuple[float, float, float]:
        """What is compared, lexicographically."""
        return (self.max_shard, self.sum_shards, self.max_row)


@numba.njit(cache=True, nogil=True)
def _rank_demand(demand, owner, result):
    for i in range(demand.shape[0]):
        for layer in range(demand.shape[1]):
            for expert in range(demand.shape[2]):
                result[i, layer, owner[layer, expert]] += demand[i, layer, expert]


def rank_demand(demand: np.ndarray, placement: Placement) -> np.ndarray:
    """q_ilp [trajectory, layer, EP rank] int32 of demand [trajectory, layer, expert], in tokens."""
    shape = (*demand.shape[:2], placement.num_ep_ranks)
    result = np.zeros(shape, np.int32)
    _rank_demand(demand, placement.owner, result)
    return result


def rank_demand_reference(demand: np.ndarray, placement: Placement) -> np.ndarray:
    """Plain numpy twin of `rank_demand`."""
    by_slot = np.take_along_axis(demand, placement.expert_of_slot[None].astype(np.int64), axis=2)
    shape = (*demand.shape[:2], placement.num_ep_ranks, placement.experts_per_rank)
    return by_slot.reshape(shape).sum(axis=3, dtype=np.int32)


def row_costs(
    length: np.ndarray, q: np.ndarray, rows: Rows, topology: Topology, cost: CostModel
) -> tuple[np.ndarray, np.ndarray]:
    """(A_rg, E_rg), each [row, EDP shard], of Equations 13 to 15.

    Args: length [trajectory] tokens; q [trajectory, layer, EP rank] routed tokens.
    """
    kept = rows.kept
    cell = rows.cell[kept].astype(np.int64)
    share = length[kept] / topology.capacity
    shape = (rows.num_rows, rows.num_dp_slots)
    linear = np.bincount(cell, share, rows.num_cells).reshape(shape)
    pairs = np.bincount(cell, share**2, rows.num_cells).reshape(shape)
    dense = np.zeros((rows.num_rows, topology.num_shards))
    for g, slots in enumerate(topology.edp_shards):
        for stage in cost.stages:
            work = stage.alpha * linear[:, slots] + stage.beta * pairs[:, slots]
            dense[:, g] += work.max(axis=1)
    row_shard = cell // rows.num_dp_slots * topology.num_shards
    row_shard += topology.shard_of_slot[cell % rows.num_dp_slots]
    expert = np.zeros(rows.num_rows * topology.num_shards)
    order = np.argsort(row_shard, kind="stable")
    starts = np.searchsorted(row_shard[order], np.arange(len(expert) + 1))
    for k in range(len(expert)):
        members = kept[order[starts[k] : starts[k + 1]]]
        expert[k] = q[members].sum(axis=0, dtype=np.int64).max(axis=1, initial=0).sum()
    unit = topology.capacity * topology.ep_groups_per_shard
    return dense, expert.reshape(rows.num_rows, topology.num_shards) / unit


def lower_bound(length: np.ndarray, load: np.ndarray, topology: Topology, cost: CostModel) -> float:
    """B = B_EP + B_dense (Equation 17), for load [layer, EP rank] of the same trajectories.

    With shards of unequal size the expert part is weighted by the smallest shard's share of the
    slots, which equals 1/G for equal shards and keeps B a bound.
    """
    smallest = min(len(shard) for shard in topology.edp_shards) / topology.num_dp_slots
    unit = topology.capacity * topology.ep_groups_per_shard
    expert = load.max(axis=1).sum() * smallest / unit
    dense = cost.dense_work(length, topology.capacity).sum() / topology.num_dp_slots
    return float(expert + dense)


def score(
    window: Window, rows: Rows, topology: Topology, cost: CostModel, placement: Placement
) -> Score:
    """Scores rows from scratch (Equation 16); dropped trajectories count nowhere."""
    q = rank_demand(window.demand, placement)
    return score_rank_demand(window.length, q, rows, topology, cost)


def score_rank_demand(
    length: np.ndarray, q: np.ndarray, rows: Rows, topology: Topology, cost: CostModel
) -> Score:
    """`score` for q [trajectory, layer, EP rank] that the caller has at hand."""
    dense, expert = row_costs(length, q, rows, topology, cost)
    row_cost = dense + expert
    shard_cost = row_cost.sum(axis=0)
    kept = rows.kept
    load = q[kept].sum(axis=0, dtype=np.int64)
    busiest = int(load.max(axis=1, initial=0).sum())
    uniform = load.sum() / load.shape[1]
    unit = topology.capacity * topology.ep_groups_per_shard
    return Score(
        max_shard=float(shard_cost.max()),
        sum_shards=float(shard_cost.sum()),
        max_row=float(row_cost.max()),
        lower_bound=lower_bound(length[kept], load, topology, cost),
        global_excess=float((busiest - uniform) / uniform) if uniform else 0.0,
        row_local_excess=float((expert.sum() * unit - busiest) / uniform) if uniform else 0.0,
        token_utilization=float(length[kept].sum() / (rows.num_cells * topology.capacity)),
        dense=float(dense.sum()),
        expert=float(expert.sum()),
    )
