"""EDP-aware pairing of completed cells into rows (Section 4.1), the start of the pair_anneal
engine.

Every row of an EDP shard is opened by the longest remaining cell; then the row's other slots take,
one by one, among the next `window` remaining cells by length, the cell that adds the least
sum_l max_p W / C plus dense maxima, less a reward for the tokens it brings (so that long cells are
not left to the end). Row-shards are filled row by row, shards in turn.
"""

from __future__ import annotations

import numba
import numpy as np

from planner.search.rescore import Problem, add_into


@numba.njit(cache=True, nogil=True)
def _pair_cells(problem, cell_load, tokens, pairs, window, token_reward, position):
    num_cells = tokens.shape[0]
    num_slots = problem.shard_of_slot.shape[0]
    num_shards = problem.shard_start.shape[0] - 1
    num_stages = problem.alpha.shape[0]
    order = np.argsort(-tokens, kind="mergesort")
    used = np.zeros(num_cells, np.bool_)
    load = np.empty(cell_load.shape[1], np.int32)
    slowest = np.empty(num_stages)
    head = 0
    for row in range(problem.num_rows):
        for shard in range(num_shards):
            load[:] = 0
            slowest[:] = 0.0
            for slot in range(problem.shard_start[shard], problem.shard_start[shard + 1]):
                while used[order[head]]:
                    head += 1
                chosen = order[head]
                if slot > problem.shard_start[shard]:
                    least = np.inf
                    seen = 0
                    for k in range(head, num_cells):
                        cell = order[k]
                        if used[cell]:
                            continue
                        seen += 1
                        if seen > window:
                            break
                        value = paired_peak_sum(load, cell_load[cell], problem.ranks) * problem.unit
                        for stage in range(num_stages):
                            work = problem.alpha[stage] * tokens[cell]
                            work += problem.beta[stage] * pairs[cell]
                            value += max(slowest[stage], work)
                        value -= token_reward * tokens[cell]
                        if value < least:
                            least = value
                            chosen = cell
                used[chosen] = True
                position[chosen] = row * num_slots + slot
                add_into(load, cell_load[chosen])
                for stage in range(num_stages):
                    work = problem.alpha[stage] * tokens[chosen]
                    work += problem.beta[stage] * pairs[chosen]
                    slowest[stage] = max(slowest[stage], work)


@numba.njit(cache=True, nogil=True)
def paired_peak_sum(load_a, load_b, ranks):
    """sum_l max_p of the sum of two flat loads."""
    num_ranks = len(ranks)
    total = 0
    if num_ranks <= 16:
        for block in range(load_a.shape[0] // (num_ranks * 8)):
            base = block * num_ranks * 8
            for lane in range(8):
                peak = load_a[base + lane] + load_b[base + lane]
                for rank in range(1, num_ranks):
                    k = base + rank * 8 + lane
                    peak = max(peak, load_a[k] + load_b[k])
                total += peak
        return total
    for layer in range(load_a.shape[0] // num_ranks):
        base = layer * num_ranks
        peak = load_a[base] + load_b[base]
        for rank in range(1, num_ranks):
            peak = max(peak, load_a[base + rank] + load_b[base + rank])
        total += peak
    return total


def pair_cells(
    problem: Problem, cell: np.ndarray, *, window: int, token_reward: float
) -> np.ndarray:
    """Rearranges whole cells into rows.

    Args: cell [trajectory] internal cells of a feasible layout; window: cells looked at;
    token_reward: cost units that a full cell is worth. Returns [trajectory] internal cells, int32.
    """
    num_cells = problem.num_rows * len(problem.shard_of_slot)
    cell_load = np.zeros((num_cells, problem.demand.shape[1]), np.int32)
    np.add.at(cell_load, cell, problem.demand[:-1])
    tokens = np.bincount(cell, problem.length[:-1], num_cells)
    pairs = np.bincount(cell, problem.pairs[:-1], num_cells)
    position = np.empty(num_cells, np.int32)
    reward = token_reward / problem.capacity
    _pair_cells(problem, cell_load, tokens, pairs, window, reward, position)
    return position[cell]
