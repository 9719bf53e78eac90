"""The search's state and its incremental rescoring: only two row-shards change with a move.

Kernels use an internal order of the DP slots in which every EDP shard is contiguous; `problem_of`
and `cells_from_internal` translate. A row-shard is row * G + shard. Demand of a trajectory and load
of a row-shard are flat int32 vectors that hold [layer block][EP rank][lane]: layers are padded to
blocks of `lanes`, so that the maximum over ranks runs on SIMD lanes of layers (up to 16 ranks) or
along the ranks (more). The number of ranks is passed as the length of a tuple of zeros, which makes
it a compile-time constant.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from planner.cost import CostModel
from planner.rows import Rows
from planner.topology import Topology

NO_LIMIT = 2**31 - 1
GUARD_WEIGHT = 16
"""Tokens of cost for each token above the memory guard's limit."""


class Problem(NamedTuple):
    """What stays fixed during a search. Index N of the first three is the zero trajectory."""

    length: np.ndarray
    """[trajectory + 1] tokens, float64 (exact integers)."""
    pairs: np.ndarray
    """[trajectory + 1] (t / C)^2."""
    demand: np.ndarray
    """[trajectory + 1, flat layer and rank] routed tokens, int32."""
    alpha: np.ndarray
    """[stage] linear coefficient per token (alpha / C)."""
    beta: np.ndarray
    """[stage] token-pair coefficient."""
    shard_start: np.ndarray
    """[EDP shard + 1] first internal slot of each shard."""
    shard_of_slot: np.ndarray
    """[internal slot] EDP shard."""
    by_length: np.ndarray
    """[place] trajectory at each place in order of falling length."""
    place: np.ndarray
    """[trajectory] place in that order."""
    capacity: float
    """C in tokens."""
    unit: float
    """Cost of one routed token on the busiest rank: 1 / (C x EP groups of a shard)."""
    num_rows: int
    ranks: tuple
    """P zeros."""
    limit: int
    """Most routed tokens that one rank should receive in a row and layer (memory guard)."""
    guarded: int
    """Flat length of the part of `demand` that the limit holds for; copies lie behind it."""


class Layout(NamedTuple):
    """A feasible assignment and everything that incremental rescoring keeps of it."""

    cell: np.ndarray
    """[trajectory] internal cell, int32."""
    num_items: np.ndarray
    """[cell] trajectories."""
    items: np.ndarray
    """[cell, position] trajectory."""
    position: np.ndarray
    """[trajectory] position within its cell."""
    tokens: np.ndarray
    """[cell] tokens, float64."""
    pairs: np.ndarray
    """[cell] sum of (t / C)^2."""
    load: np.ndarray
    """[row-shard, flat layer and rank] routed tokens W, int32."""
    dense: np.ndarray
    """[row-shard] A_rg."""
    row_cost: np.ndarray
    """[row-shard] J_rg."""
    shard_cost: np.ndarray
    """[EDP shard] U_g."""


def lanes_of(num_ranks: int) -> int:
    """Layers that one SIMD block holds."""
    return 8 if num_ranks <= 16 else 1


def flatten_demand(q: np.ndarray) -> np.ndarray:
    """q [trajectory, layer, EP rank] as [trajectory + 1, flat]; the last one is all zero."""
    num, num_layers, num_ranks = q.shape
    lanes = lanes_of(num_ranks)
    blocks = -(-num_layers // lanes)
    flat = np.zeros((num + 1, blocks, num_ranks, lanes), np.int32)
    for block in range(blocks):
        part = q[:, block * lanes : (block + 1) * lanes]
        flat[:num, block, :, : part.shape[1]] = part.transpose(0, 2, 1)
    return flat.reshape(num + 1, -1)


def problem_of(
    length: np.ndarray,
    q: np.ndarray,
    num_rows: int,
    topology: Topology,
    cost: CostModel,
    *,
    copies: np.ndarray | None = None,
    copy_weight: float = 0.0,
    limit: int | None = None,
) -> Problem:
    """The search problem of length [trajectory] and q [trajectory, layer, EP rank].

    Args: copies [trajectory, layer, EP rank] deduplicated token copies, charged copy_weight times
    the peak of a row; limit: routed tokens a rank should receive at most in a row and layer.
    """
    demand = flatten_demand(q)
    guarded = demand.shape[1]
    if copies is not None and copy_weight > 0:
        weighted = np.rint(copies * copy_weight).astype(np.int32)
        demand = np.concatenate([demand, flatten_demand(weighted)], axis=1)
    padded = np.append(np.asarray(length, np.float64), 0.0)
    by_length = np.argsort(-padded[:-1], kind="stable")
    place = np.empty_like(by_length)
    place[by_length] = np.arange(len(by_length))
    sizes = [len(shard) for shard in topology.edp_shards]
    return Problem(
        length=padded,
        pairs=(padded / topology.capacity) ** 2,
        demand=demand,
        alpha=cost.alpha / topology.capacity,
        beta=cost.beta,
        shard_start=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        shard_of_slot=np.repeat(np.arange(len(sizes)), sizes),
        by_length=by_length,
        place=place,
        capacity=float(topology.capacity),
        unit=1.0 / (topology.capacity * topology.ep_groups_per_shard),
        num_rows=num_rows,
        ranks=(0,) * topology.num_ep_ranks,
        limit=NO_LIMIT if limit is None else min(NO_LIMIT, limit * topology.ep_groups_per_shard),
        guarded=guarded,
    )


def cells_to_internal(cell: np.ndarray, topology: Topology) -> np.ndarray:
    """[trajectory] row * D + DP slot -> row * D + internal slot, int32."""
    slots = np.concatenate([np.array(shard) for shard in topology.edp_shards])
    internal = np.argsort(slots)
    row, slot = np.divmod(np.asarray(cell, np.int64), topology.num_dp_slots)
    return (row * topology.num_dp_slots + internal[slot]).astype(np.int32)


def cells_from_internal(cell: np.ndarray, topology: Topology) -> np.ndarray:
    """The inverse of `cells_to_internal`."""
    slots = np.concatenate([np.array(shard) for shard in topology.edp_shards])
    row, internal = np.divmod(np.asarray(cell, np.int64), topology.num_dp_slots)
    return (row * topology.num_dp_slots + slots[internal]).astype(np.int32)


def layout_of(problem: Problem, cell: np.ndarray, spare_positions: int = 16) -> Layout:
    """A fresh layout of internal cells; `spare_positions` is how many items a cell may gain."""
    num = len(cell)
    num_slots, num_shards = len(problem.shard_of_slot), len(problem.shard_start) - 1
    num_cells, num_row_shards = problem.num_rows * num_slots, problem.num_rows * num_shards
    most = min(num, int(np.bincount(cell, minlength=num_cells).max()) + spare_positions)
    layout = Layout(
        cell=np.array(cell, np.int32),
        num_items=np.zeros(num_cells, np.int64),
        items=np.zeros((num_cells, most), np.int32),
        position=np.zeros(num, np.int32),
        tokens=np.zeros(num_cells),
        pairs=np.zeros(num_cells),
        load=np.zeros((num_row_shards, problem.demand.shape[1]), np.int32),
        dense=np.zeros(num_row_shards),
        row_cost=np.zeros(num_row_shards),
        shard_cost=np.zeros(num_shards),
    )
    rebuild(problem, layout)
    return layout


@numba.njit(cache=True, nogil=True)
def rebuild(problem, layout):
    """Recomputes everything in the layout from `layout.cell`."""
    num_slots = problem.shard_of_slot.shape[0]
    num_shards = problem.shard_start.shape[0] - 1
    layout.num_items[:] = 0
    layout.tokens[:] = 0.0
    layout.pairs[:] = 0.0
    layout.load[:] = 0
    layout.shard_cost[:] = 0.0
    for i in range(layout.cell.shape[0]):
        cell = layout.cell[i]
        layout.items[cell, layout.num_items[cell]] = i
        layout.position[i] = layout.num_items[cell]
        layout.num_items[cell] += 1
        layout.tokens[cell] += problem.length[i]
        layout.pairs[cell] += problem.pairs[i]
        row_shard = cell // num_slots * num_shards + problem.shard_of_slot[cell % num_slots]
        add_into(layout.load[row_shard], problem.demand[i])
    for row_shard in range(layout.row_cost.shape[0]):
        dense = dense_cost(problem, layout, row_shard)
        layout.dense[row_shard] = dense
        peak = peak_sum(layout.load[row_shard], problem.ranks, problem.limit, problem.guarded)
        layout.row_cost[row_shard] = dense + peak * problem.unit
        layout.shard_cost[row_shard % num_shards] += layout.row_cost[row_shard]


@numba.njit(cache=True, nogil=True)
def add_into(total, vector):
    for k in range(total.shape[0]):
        total[k] += vector[k]


@numba.njit(cache=True, nogil=True, inline="always")
def dense_cost(problem, layout, row_shard):
    """A_rg of a row-shard from the tokens and pairs of its cells."""
    num_shards = problem.shard_start.shape[0] - 1
    shard = row_shard % num_shards
    first_of_row = row_shard // num_shards * problem.shard_of_slot.shape[0]
    first = first_of_row + problem.shard_start[shard]
    last = first_of_row + problem.shard_start[shard + 1]
    total = 0.0
    for stage in range(problem.alpha.shape[0]):
        alpha = problem.alpha[stage]
        beta = problem.beta[stage]
        slowest = 0.0
        for cell in range(first, last):
            slowest = max(slowest, alpha * layout.tokens[cell] + beta * layout.pairs[cell])
        total += slowest
    return total


@numba.njit(cache=True, nogil=True)
def peak_sum(load, ranks, limit, guarded):
    """sum_l max_p of one flat load, plus GUARD_WEIGHT for each token of a peak above the limit."""
    num_ranks = len(ranks)
    lanes = 8 if num_ranks <= 16 else 1
    total = 0
    for base in range(0, load.shape[0], num_ranks * lanes):
        allowed = limit if base < guarded else NO_LIMIT
        for lane in range(lanes):
            peak = load[base + lane]
            for rank in range(1, num_ranks):
                peak = max(peak, load[base + rank * lanes + lane])
            total += peak + GUARD_WEIGHT * max(0, peak - allowed)
    return total


@numba.njit(cache=True, nogil=True)
def exchange_peak_sums(load_a, load_b, leaving, entering, ranks, limit, guarded):
    """peak_sum of (load_a - leaving + entering) and (load_b + leaving - entering), in one pass."""
    num_ranks = len(ranks)
    weight = np.int32(GUARD_WEIGHT)
    zero = np.int32(0)
    total_a = 0
    total_b = 0
    if num_ranks <= 16:
        for block in range(load_a.shape[0] // (num_ranks * 8)):
            base = block * num_ranks * 8
            allowed = np.int32(limit if base < guarded else NO_LIMIT)
            for lane in range(8):
                change = entering[base + lane] - leaving[base + lane]
                peak_a = load_a[base + lane] + change
                peak_b = load_b[base + lane] - change
                for rank in range(1, num_ranks):
                    k = base + rank * 8 + lane
                    change = entering[k] - leaving[k]
                    peak_a = max(peak_a, load_a[k] + change)
                    peak_b = max(peak_b, load_b[k] - change)
                total_a += peak_a + weight * max(zero, peak_a - allowed)
                total_b += peak_b + weight * max(zero, peak_b - allowed)
        return total_a, total_b
    for layer in range(load_a.shape[0] // num_ranks):
        base = layer * num_ranks
        allowed = np.int32(limit if base < guarded else NO_LIMIT)
        change = entering[base] - leaving[base]
        peak_a = load_a[base] + change
        peak_b = load_b[base] - change
        for rank in range(1, num_ranks):
            k = base + rank
            change = entering[k] - leaving[k]
            peak_a = max(peak_a, load_a[k] + change)
            peak_b = max(peak_b, load_b[k] - change)
        total_a += peak_a + weight * max(zero, peak_a - allowed)
        total_b += peak_b + weight * max(zero, peak_b - allowed)
    return total_a, total_b


def peak_sum_reference(load: np.ndarray, num_ranks: int, limit: int, guarded: int) -> int:
    """Plain numpy twin of `peak_sum`."""
    lanes = lanes_of(num_ranks)
    peaks = load.reshape(-1, num_ranks, lanes).max(axis=1).astype(np.int64)
    above = np.maximum(0, peaks[: guarded // (num_ranks * lanes)] - limit)
    return int(peaks.sum() + GUARD_WEIGHT * above.sum())


def exchange_peak_sums_reference(
    load_a: np.ndarray,
    load_b: np.ndarray,
    leaving: np.ndarray,
    entering: np.ndarray,
    num_ranks: int,
    limit: int,
    guarded: int,
) -> tuple[int, int]:
    """Plain numpy twin of `exchange_peak_sums`."""
    change = entering - leaving
    return (
        peak_sum_reference(load_a + change, num_ranks, limit, guarded),
        peak_sum_reference(load_b - change, num_ranks, limit, guarded),
    )


def rows_of(layout_cell: np.ndarray, problem: Problem, topology: Topology) -> Rows:
    """The rows of internal cells."""
    cell = cells_from_internal(layout_cell, topology)
    return Rows(cell=cell, num_rows=problem.num_rows, num_dp_slots=topology.num_dp_slots)
