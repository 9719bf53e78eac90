"""The order of rows with the least predicted 1F1B time: cheap rows fill and drain the pipeline."""

from __future__ import annotations

import numba
import numpy as np

from planner.pipeline_sim import BACKWARD_SHARE, makespan, ordered_makespan
from planner.random_numbers import random_below, random_state
from planner.rows import Rows
from planner.topology import Topology

NUM_EXCHANGES = 400


def valley(cost: np.ndarray) -> np.ndarray:
    """Rows by cost [row]: the cheapest first and last, the dearest in the middle."""
    ascending = np.argsort(cost, kind="stable")
    return np.concatenate([ascending[::2], ascending[1::2][::-1]])


@numba.njit(cache=True, nogil=True)
def exchange_rows(row_cost, order, num_ranks, num_chunks, group, share, num_exchanges, random):
    """Keeps random exchanges of two rows that shorten the simulated time; order [row] in place."""
    least = ordered_makespan(row_cost, order, num_ranks, num_chunks, group, share)
    for _ in range(num_exchanges):
        a = random_below(random, order.shape[0])
        b = random_below(random, order.shape[0])
        if a == b:
            continue
        order[a], order[b] = order[b], order[a]
        time = ordered_makespan(row_cost, order, num_ranks, num_chunks, group, share)
        if time <= least:
            least = time
        else:
            order[a], order[b] = order[b], order[a]
    return least


def best_row_order(row_cost: np.ndarray, topology: Topology, seed: int = 0) -> np.ndarray:
    """[row] order of least predicted time for row_cost [row, EDP shard]; given order on ties."""
    given = np.arange(len(row_cost))
    if topology.pp == 1 or len(row_cost) == 1:
        return given
    cost = row_cost.max(axis=1)
    starts = [given, valley(cost), np.argsort(cost), np.argsort(-cost)]
    group = topology.row_multiple if topology.vpp > 1 else len(row_cost)
    pipeline = (topology.pp, topology.vpp, group, BACKWARD_SHARE)
    best, least = given, makespan(row_cost, topology)
    for number, start in enumerate(starts):
        order = start.copy()
        random = random_state(seed, 2_000_000 + number)
        time = exchange_rows(row_cost, order, *pipeline, NUM_EXCHANGES, random)
        if time < least:
            best, least = order, time
    return best


def reordered(rows: Rows, order: np.ndarray) -> Rows:
    """The same cells with row order[k] run k-th."""
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    row, slot = np.divmod(rows.cell.astype(np.int64), rows.num_dp_slots)
    cell = np.where(rows.cell < 0, -1, place[row] * rows.num_dp_slots + slot)
    return Rows(cell=cell, num_rows=rows.num_rows, num_dp_slots=rows.num_dp_slots)
