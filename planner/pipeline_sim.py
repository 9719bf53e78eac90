"""Exact simulation of one optimizer step's 1F1B pipeline, plain and interleaved.

Every pipeline rank runs its forwards and backwards in the fixed order of Megatron's schedules
(megatron/core/pipeline_parallel/schedules.py): warm-up forwards, then one forward and one backward
in turn, then the remaining backwards. An operation starts when its rank is free and its predecessor
is done: the same microbatch's forward on the chunk before, or backward on the chunk after.
Communication takes no time. A row's work is spread evenly over pp * vpp chunks.
"""

from __future__ import annotations

import heapq

import numba
import numpy as np

from planner.topology import Topology

BACKWARD_SHARE = 2.0 / 3.0
"""Share of a row's cost that is spent in its backward."""


@numba.njit(cache=True, nogil=True)
def virtual_microbatch(number, forward, num_chunks, group):
    """(chunk, row) of the number-th forward or backward of a pipeline rank."""
    per_group = group * num_chunks
    within = number % per_group
    chunk = within // group
    if not forward:
        chunk = num_chunks - 1 - chunk
    return chunk, number // per_group * group + within % group


@numba.njit(cache=True, nogil=True)
def num_warmup(rank, num_ranks, num_chunks, group, total):
    """Forwards of a pipeline rank before its first backward."""
    warmup = num_ranks - rank - 1
    if num_chunks > 1:
        warmup = 2 * warmup + (num_chunks - 1) * group
    return min(warmup, total)


@numba.njit(cache=True, nogil=True)
def operation_at(position, warmup, total):
    """(is forward, number) of the operation at a position of a rank's order."""
    if position < warmup:
        return True, position
    steady = position - warmup
    if steady < 2 * (total - warmup):
        return steady % 2 == 0, (warmup if steady % 2 == 0 else 0) + steady // 2
    return False, position - total


@numba.njit(cache=True, nogil=True)
def simulate(forward, backward, num_ranks, num_chunks, group):
    """Time at which the last operation ends.

    Args: forward, backward [row] time of one chunk; num_ranks: pp; num_chunks: vpp; group: rows
    that a chunk runs before the next chunk's turn (rows must be a multiple of it when num_chunks >
    1).
    """
    num_rows = forward.shape[0]
    total = num_rows * num_chunks
    num_stages = num_ranks * num_chunks
    ended_forward = np.full((num_stages, num_rows), -1.0)
    ended_backward = np.full((num_stages, num_rows), -1.0)
    position = np.zeros(num_ranks, np.int64)
    free = np.zeros(num_ranks)
    left = 2 * total * num_ranks
    while left > 0:
        advanced = False
        for rank in range(num_ranks):
            warmup = num_warmup(rank, num_ranks, num_chunks, group, total)
            while position[rank] < 2 * total:
                is_forward, number = operation_at(position[rank], warmup, total)
                chunk, row = virtual_microbatch(number, is_forward, num_chunks, group)
                stage = chunk * num_ranks + rank
                ready = 0.0
                if is_forward:
                    if stage > 0:
                        ready = ended_forward[stage - 1, row]
                elif stage < num_stages - 1:
                    ready = ended_backward[stage + 1, row]
                else:
                    ready = ended_forward[stage, row]
                if ready < 0.0:
                    break
                end = max(free[rank], ready) + (forward[row] if is_forward else backward[row])
                if is_forward:
                    ended_forward[stage, row] = end
                else:
                    ended_backward[stage, row] = end
                free[rank] = end
                position[rank] += 1
                left -= 1
                advanced = True
        if not advanced:
            return np.inf
    return free.max()


@numba.njit(cache=True, nogil=True)
def ordered_makespan(row_cost, order, num_ranks, num_chunks, group, backward_share):
    """Slowest EDP shard's simulated time for row_cost [row, EDP shard] run in `order` [row]."""
    slowest = 0.0
    for shard in range(row_cost.shape[1]):
        cost = np.empty(order.shape[0])
        for k in range(order.shape[0]):
            cost[k] = row_cost[order[k], shard] / (num_ranks * num_chunks)
        forward = cost * (1.0 - backward_share)
        backward = cost * backward_share
        slowest = max(slowest, simulate(forward, backward, num_ranks, num_chunks, group))
    return slowest


def makespan(row_cost: np.ndarray, topology: Topology, order: np.ndarray | None = None) -> float:
    """Predicted time of a step in joint-cost units, for row_cost J_rg [row, EDP shard].

    With one pipeline rank it equals max_g U_g. Raises ValueError when rows do not fit the
    interleaved schedule's group.
    """
    num_rows = len(row_cost)
    if num_rows % topology.row_multiple:
        raise ValueError(
            f"rows: got {num_rows}, expected a multiple of {topology.row_multiple} for "
            f"vpp={topology.vpp}"
        )
    if topology.pp == 1:
        return float(row_cost.sum(axis=0).max())
    if order is None:
        order = np.arange(num_rows)
    group = topology.row_multiple if topology.vpp > 1 else num_rows
    return float(
        ordered_makespan(row_cost, order, topology.pp, topology.vpp, group, BACKWARD_SHARE)
    )


def simulate_events(
    forward: np.ndarray, backward: np.ndarray, num_ranks: int, num_chunks: int, group: int
) -> float:
    """Plain twin of `simulate`: a discrete-event simulation with a clock and an event queue."""
    num_rows = len(forward)
    total = num_rows * num_chunks
    last = num_ranks * num_chunks - 1
    queues: list[list[tuple[str, int, int]]] = []
    for rank in range(num_ranks):
        numbers = range(total)
        forwards = [
            ("F", *_stage_row(k, True, rank, num_ranks, num_chunks, group)) for k in numbers
        ]
        backwards = [
            ("B", *_stage_row(k, False, rank, num_ranks, num_chunks, group)) for k in numbers
        ]
        warmup = num_warmup(rank, num_ranks, num_chunks, group, total)
        order = forwards[:warmup]
        for k in range(total - warmup):
            order += [forwards[warmup + k], backwards[k]]
        queues.append(order + backwards[total - warmup :])
    done: set[tuple[str, int, int]] = set()
    busy = [False] * num_ranks
    events: list[tuple[float, int, tuple[str, int, int]]] = []
    clock = 0.0

    def needs(operation: tuple[str, int, int]) -> tuple[str, int, int] | None:
        kind, stage, row = operation
        if kind == "F":
            return ("F", stage - 1, row) if stage else None
        return ("B", stage + 1, row) if stage < last else ("F", stage, row)

    while True:
        for rank in range(num_ranks):
            if busy[rank] or not queues[rank]:
                continue
            operation = queues[rank][0]
            if needs(operation) is None or needs(operation) in done:
                queues[rank].pop(0)
                busy[rank] = True
                duration = (forward if operation[0] == "F" else backward)[operation[2]]
                heapq.heappush(events, (clock + duration, rank, operation))
        if not events:
            return float("inf") if any(queues) else clock
        clock, rank, operation = heapq.heappop(events)
        busy[rank] = False
        done.add(operation)


def _stage_row(
    number: int, forward: bool, rank: int, num_ranks: int, num_chunks: int, group: int
) -> tuple[int, int]:
    chunk, row = virtual_microbatch(number, forward, num_chunks, group)
    return chunk * num_ranks + rank, row
