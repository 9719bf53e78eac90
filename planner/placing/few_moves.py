"""Cyclic repair: one layer's CV target with fewer moved experts than greedy swaps.

A swap moves two experts to correct two ranks. A cycle that moves one expert out of every rank
corrects all P ranks with P moves: walking the ranks in a random order, each rank passes on the
expert whose load is nearest to the load it receives plus its own surplus over the mean. Every start
expert and many orders are tried; the chains of least squared residual are finished by exact greedy
swaps, and the result with the fewest net moves that meets the target is kept, greedy's own
included.
"""

from __future__ import annotations

import numba
import numpy as np

from planner.placing.greedy import (
    TARGET_MET,
    repair_layer,
    repair_layer_reference,
    sort_by_rank,
    squared_deviation,
)

NUM_ORDERS = 200
KEPT_CHAINS = 64


@numba.njit(cache=True, nogil=True, inline="always")
def nearest(list_load, rank, wanted):
    """Entry nearest to `wanted` in a rank's ascending list, ties to the lower."""
    low, high = 0, list_load.shape[1]
    while low < high:
        middle = (low + high) // 2
        if list_load[rank, middle] < wanted:
            low = middle + 1
        else:
            high = middle
    last = list_load.shape[1] - 1
    if low > last or (
        low > 0 and wanted - list_load[rank, low - 1] <= list_load[rank, low] - wanted
    ):
        low -= 1
    while low > 0 and list_load[rank, low - 1] == list_load[rank, low]:
        low -= 1
    return low


@numba.njit(cache=True, nogil=True, inline="always")
def walk_cycle(list_load, surplus, orders, number, start, ceiling, picks):
    """Squared residual of one cycle over orders[number]; fills picks; inf once above `ceiling`."""
    num_ranks = orders.shape[1]
    head = orders[number, 0]
    first = list_load[head, start]
    received = first
    picks[0] = start
    residual = 0.0
    for k in range(1, num_ranks):
        rank = orders[number, k]
        wanted = received + surplus[rank]
        entry = nearest(list_load, rank, wanted)
        picks[k] = entry
        received = list_load[rank, entry]
        residual += (received - wanted) ** 2
        if residual >= ceiling:
            residual = np.inf
            break
    return residual + (received + surplus[head] - first) ** 2


@numba.njit(cache=True, nogil=True)
def cyclic_repair(load, owner, num_ranks, cv_target, orders):
    """Repairs one layer: load [expert] int64, owner [expert] changed in place, orders [try, rank].

    Returns (moved experts, reason) with the reasons of `greedy_placement`.
    """
    num_experts = load.shape[0]
    size = num_experts // num_ranks
    list_load = np.empty((num_ranks, size), np.int64)
    list_expert = np.empty((num_ranks, size), np.int64)
    rank_total = np.empty(num_ranks, np.int64)
    sort_by_rank(load, owner, num_ranks, list_load, list_expert, rank_total)
    mean = rank_total.sum() / num_ranks
    limit = (cv_target * mean) ** 2 * num_ranks
    if squared_deviation(rank_total, mean) <= limit:
        return 0, TARGET_MET
    surplus = rank_total - mean
    kept = 0
    residuals = np.empty(KEPT_CHAINS)
    kept_order = np.empty(KEPT_CHAINS, np.int64)
    kept_picks = np.empty((KEPT_CHAINS, num_ranks), np.int64)
    picks = np.empty(num_ranks, np.int64)
    for number in range(orders.shape[0]):
        for start in range(size):
            ceiling = residuals[kept - 1] if kept == KEPT_CHAINS else np.inf
            residual = walk_cycle(list_load, surplus, orders, number, start, ceiling, picks)
            if residual >= ceiling:
                continue
            k = kept if kept < KEPT_CHAINS else KEPT_CHAINS - 1
            kept = min(kept + 1, KEPT_CHAINS)
            while k > 0 and residuals[k - 1] > residual:
                residuals[k] = residuals[k - 1]
                kept_order[k] = kept_order[k - 1]
                for rank in range(num_ranks):
                    kept_picks[k, rank] = kept_picks[k - 1, rank]
                k -= 1
            residuals[k] = residual
            kept_order[k] = number
            for rank in range(num_ranks):
                kept_picks[k, rank] = picks[rank]
        if kept > 0 and residuals[0] <= limit:
            break
    best_owner = owner.copy()
    path = np.empty((2 * num_experts, 2), np.int32)
    _, best_reason = repair_layer(load, best_owner, num_ranks, cv_target, path, num_ranks)
    best_moved = (best_owner != owner).sum()
    for chain in range(kept):
        candidate = owner.copy()
        order = orders[kept_order[chain]]
        for k in range(num_ranks):
            expert = list_expert[order[k], kept_picks[chain, k]]
            candidate[expert] = order[(k + 1) % num_ranks]
        _, reason = repair_layer(load, candidate, num_ranks, cv_target, path, num_ranks)
        moved = (candidate != owner).sum()
        better = reason == TARGET_MET and (best_reason != TARGET_MET or moved < best_moved)
        if better:
            best_owner, best_moved, best_reason = candidate, moved, reason
        if residuals[chain] <= limit:
            break
    owner[:] = best_owner
    return best_moved, best_reason


@numba.njit(cache=True, nogil=True)
def cyclic_repair_layers(load, owner, num_ranks, cv_target, orders, moved, reason):
    """`cyclic_repair` for load, owner [layer, expert] and orders [layer, try, rank]."""
    for layer in range(load.shape[0]):
        moved[layer], reason[layer] = cyclic_repair(
            load[layer], owner[layer], num_ranks, cv_target, orders[layer]
        )


def random_orders(num_layers: int, num_ranks: int, seed: int) -> np.ndarray:
    """[layer, try, rank] random cycles over the ranks."""
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((num_layers, NUM_ORDERS, num_ranks)), axis=2)


def cyclic_repair_reference(
    load: np.ndarray, owner: np.ndarray, num_ranks: int, cv_target: float, orders: np.ndarray
) -> tuple[int, int]:
    """Plain numpy twin of `cyclic_repair`."""
    total = np.bincount(owner, load, num_ranks).astype(np.int64)
    mean = total.sum() / num_ranks
    limit = (cv_target * mean) ** 2 * num_ranks
    if ((total - mean) ** 2).sum() <= limit:
        return 0, TARGET_MET
    by_load = np.argsort(load, kind="stable")
    experts = [by_load[owner[by_load] == rank] for rank in range(num_ranks)]
    chains: list[tuple[float, int, list[int]]] = []
    for number, order in enumerate(orders):
        for start in range(len(load) // num_ranks):
            picks, residual = [start], 0.0
            received = load[experts[order[0]][start]]
            for rank in order[1:]:
                wanted = received + total[rank] - mean
                loads = load[experts[rank]]
                picks.append(int(np.argmin(np.abs(loads - wanted))))
                received = loads[picks[-1]]
                residual += (received - wanted) ** 2
            back = received + total[order[0]] - mean - load[experts[order[0]][start]]
            chains.append((residual + back**2, number, picks))
        chains = sorted(chains, key=lambda chain: chain[0])[:KEPT_CHAINS]
        if chains[0][0] <= limit:
            break
    best = owner.copy()
    path = np.empty((2 * len(load), 2), np.int32)
    _, best_reason = repair_layer_reference(load, best, num_ranks, cv_target, path, num_ranks)
    best_moved = int((best != owner).sum())
    for residual, number, picks in chains:
        candidate = owner.copy()
        order = orders[number]
        for k in range(num_ranks):
            candidate[experts[order[k]][picks[k]]] = order[(k + 1) % num_ranks]
        _, reason = repair_layer_reference(load, candidate, num_ranks, cv_target, path, num_ranks)
        moved = int((candidate != owner).sum())
        if reason == TARGET_MET and (best_reason != TARGET_MET or moved < best_moved):
            best, best_moved, best_reason = candidate, moved, reason
        if residual <= limit:
            break
    owner[:] = best
    return best_moved, best_reason
