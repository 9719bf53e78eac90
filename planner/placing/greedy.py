"""Exact greedy swap repair of one layer's placement (Section 3.2), by two pointers.

Repeats the cross-rank swap with the largest strict reduction of sum_p G_p^2. Swapping expert a of
the heavier rank with expert b of the lighter one, d = load(a) - load(b) and gap D, saves 2 d (D -
d), greatest at d = D/2 and at most D^2/2. So rank pairs are visited by descending gap until D^2/2
cannot beat the best swap found, and inside a pair two pointers over the ranks' ascending load lists
find the d nearest D/2. Ties go to the lowest (rank pair, expert) index.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np

TARGET_MET = 0
NO_IMPROVING_SWAP = 1
LIMIT_REACHED = 2


@numba.njit(cache=True, nogil=True)
def sort_by_rank(load, owner, num_ranks, list_load, list_expert, rank_total):
    """Fills list_load (ascending), list_expert [rank, experts per rank] and rank_total [rank]."""
    count = np.zeros(num_ranks, np.int64)
    rank_total[:] = 0
    for expert in range(load.shape[0]):
        rank = owner[expert]
        value = load[expert]
        rank_total[rank] += value
        k = count[rank]
        while k > 0 and list_load[rank, k - 1] > value:
            list_load[rank, k] = list_load[rank, k - 1]
            list_expert[rank, k] = list_expert[rank, k - 1]
            k -= 1
        list_load[rank, k] = value
        list_expert[rank, k] = expert
        count[rank] += 1


@numba.njit(cache=True, nogil=True)
def replace_entry(list_load, list_expert, rank, k, value, expert):
    """Replaces entry k of a rank's list and restores (load, expert) order."""
    size = list_load.shape[1]
    while k + 1 < size and (
        list_load[rank, k + 1] < value
        or (list_load[rank, k + 1] == value and list_expert[rank, k + 1] < expert)
    ):
        list_load[rank, k] = list_load[rank, k + 1]
        list_expert[rank, k] = list_expert[rank, k + 1]
        k += 1
    while k > 0 and (
        list_load[rank, k - 1] > value
        or (list_load[rank, k - 1] == value and list_expert[rank, k - 1] > expert)
    ):
        list_load[rank, k] = list_load[rank, k - 1]
        list_expert[rank, k] = list_expert[rank, k - 1]
        k -= 1
    list_load[rank, k] = value
    list_expert[rank, k] = expert


@numba.njit(cache=True, nogil=True)
def first_of_equal(values, k):
    """Lowest index whose value equals values[k], in an ascending list."""
    while k > 0 and values[k - 1] == values[k]:
        k -= 1
    return k


@numba.njit(cache=True, nogil=True)
def best_swap(list_load, list_expert, rank_total, by_load, ranks_per_node):
    """The best swap: (gain, heavy rank, light rank, heavy entry, light entry); gain 0: none
    improves.

    by_load is scratch [rank] (ranks by descending load). Only pairs of ranks on one node of
    `ranks_per_node` ranks are considered.
    """
    num_ranks, size = list_load.shape
    for rank in range(num_ranks):
        k = rank
        while k > 0 and rank_total[by_load[k - 1]] < rank_total[rank]:
            by_load[k] = by_load[k - 1]
            k -= 1
        by_load[k] = rank
    best = 0
    best_heavy = best_light = best_i = best_j = -1
    key = (num_ranks, num_ranks, 0, 0)
    for x in range(num_ranks - 1):
        heavy = by_load[x]
        widest = rank_total[heavy] - rank_total[by_load[num_ranks - 1]]
        if widest <= 0 or widest * widest // 2 < best:
            break
        heavy_load = list_load[heavy]
        for y in range(num_ranks - 1, x, -1):
            light = by_load[y]
            gap = rank_total[heavy] - rank_total[light]
            if gap <= 0 or gap * gap // 2 < best:
                break
            if heavy // ranks_per_node != light // ranks_per_node:
                continue
            light_load = list_load[light]
            pair = (min(heavy, light), max(heavy, light))
            i = 0
            for j in range(size):
                if j > 0 and light_load[j] == light_load[j - 1]:
                    continue
                wanted = 2 * light_load[j] + gap
                while i < size and 2 * heavy_load[i] < wanted:
                    i += 1
                for near in (i - 1, i):
                    if near < 0 or near >= size:
                        continue
                    d = heavy_load[near] - light_load[j]
                    gain = 2 * d * (gap - d)
                    if gain < best or gain <= 0:
                        continue
                    first = first_of_equal(heavy_load, near)
                    a, b = list_expert[heavy, first], list_expert[light, j]
                    candidate = (pair[0], pair[1], min(a, b), max(a, b))
                    if gain > best or candidate < key:
                        best, key = gain, candidate
                        best_heavy, best_light, best_i, best_j = heavy, light, first, j
    return best, best_heavy, best_light, best_i, best_j


@numba.njit(cache=True, nogil=True)
def squared_deviation(rank_total, mean):
    total = 0.0
    for value in rank_total:
        total += (value - mean) ** 2
    return total


@numba.njit(cache=True, nogil=True)
def repair_layer(load, owner, num_ranks, cv_target, path, ranks_per_node):
    """Swaps experts of one layer until the CV target, no improving swap, or the path is full.

    Args: load [expert] routed tokens int64; owner [expert] EP rank, changed in place; path [swap,
    2] receives the experts of every swap; ranks_per_node: ranks that may swap with each other.
    Returns (swaps, reason): TARGET_MET, NO_IMPROVING_SWAP or LIMIT_REACHED.
    """
    size = load.shape[0] // num_ranks
    list_load = np.empty((num_ranks, size), np.int64)
    list_expert = np.empty((num_ranks, size), np.int64)
    rank_total = np.empty(num_ranks, np.int64)
    by_load = np.empty(num_ranks, np.int64)
    sort_by_rank(load, owner, num_ranks, list_load, list_expert, rank_total)
    mean = rank_total.sum() / num_ranks
    limit = (cv_target * mean) ** 2 * num_ranks
    swaps = 0
    while squared_deviation(rank_total, mean) > limit:
        if swaps == path.shape[0]:
            return swaps, LIMIT_REACHED
        gain, heavy, light, i, j = best_swap(
            list_load, list_expert, rank_total, by_load, ranks_per_node
        )
        if gain <= 0:
            return swaps, NO_IMPROVING_SWAP
        a, b = list_expert[heavy, i], list_expert[light, j]
        d = load[a] - load[b]
        replace_entry(list_load, list_expert, heavy, i, load[b], b)
        replace_entry(list_load, list_expert, light, j, load[a], a)
        rank_total[heavy] -= d
        rank_total[light] += d
        owner[a], owner[b] = light, heavy
        path[swaps, 0], path[swaps, 1] = a, b
        swaps += 1
    return swaps, TARGET_MET


@numba.njit(cache=True, nogil=True)
def repair_layers(load, owner, num_ranks, cv_target, path, ranks_per_node, swaps, reason):
    """`repair_layer` for load, owner [layer, expert], path [layer, swap, 2]; fills the others."""
    for layer in range(load.shape[0]):
        swaps[layer], reason[layer] = repair_layer(
            load[layer], owner[layer], num_ranks, cv_target, path[layer], ranks_per_node
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Repair:
    """The greedy repair of all layers, as the swaps it made."""

    owner: np.ndarray
    """[layer, expert] EP rank after the repair."""
    path: np.ndarray
    """[layer, swap, 2] experts swapped, in order; the first num_swaps of a layer count."""
    num_swaps: np.ndarray
    """[layer]"""
    reason: np.ndarray
    """[layer] TARGET_MET, NO_IMPROVING_SWAP or LIMIT_REACHED."""


def greedy_repair(
    load: np.ndarray,
    owner: np.ndarray,
    num_ranks: int,
    cv_target: float,
    ranks_per_node: int | None = None,
) -> Repair:
    """Repairs all layers of load, owner [layer, expert]; inside nodes only when they are given."""
    num_layers, num_experts = load.shape
    owner = owner.astype(np.int64)
    path = np.zeros((num_layers, 2 * num_experts, 2), np.int32)
    swaps = np.zeros(num_layers, np.int64)
    reason = np.zeros(num_layers, np.int64)
    node = num_ranks if ranks_per_node is None else ranks_per_node
    repair_layers(load, owner, num_ranks, cv_target, path, node, swaps, reason)
    return Repair(owner=owner, path=path, num_swaps=swaps, reason=reason)


def repair_layer_reference(
    load: np.ndarray,
    owner: np.ndarray,
    num_ranks: int,
    cv_target: float,
    path: np.ndarray,
    ranks_per_node: int,
) -> tuple[int, int]:
    """Plain numpy twin of `repair_layer`: tries every swap of every rank pair."""
    swaps = 0
    while True:
        total = np.bincount(owner, load, num_ranks).astype(np.int64)
        mean = total.sum() / num_ranks
        if ((total - mean) ** 2).sum() <= (cv_target * mean) ** 2 * num_ranks:
            return swaps, TARGET_MET
        if swaps == len(path):
            return swaps, LIMIT_REACHED
        d = load[:, None] - load[None, :]
        gap = total[owner][:, None] - total[owner][None, :]
        node = owner // ranks_per_node
        allowed = (gap > 0) & (d > 0) & (node[:, None] == node[None, :])
        gain = np.where(allowed, 2 * d * (gap - d), 0)
        if gain.max() <= 0:
            return swaps, NO_IMPROVING_SWAP
        tied = [(int(a), int(b)) for a, b in np.argwhere(gain == gain.max())]
        a, b = min(
            tied, key=lambda ab: (*sorted((int(owner[ab[0]]), int(owner[ab[1]]))), *sorted(ab))
        )
        owner[a], owner[b] = owner[b], owner[a]
        path[swaps] = (a, b) if gap[a, b] > 0 else (b, a)
        swaps += 1
