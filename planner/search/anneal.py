"""One annealing chain: proposals, incremental rescoring, Metropolis acceptance (Section 4.1).

Four moves keep a layout feasible (no cell above C but a single long trajectory, none empty): swap a
trajectory with one of another cell, relocate a trajectory, swap two whole cells, and exchange
random subsets of two small cells. Releases the GIL; the state of the random numbers is an argument,
so that a chain cut into slices equals one that runs through.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numba
import numpy as np

from planner.random_numbers import random_below, random_unit
from planner.search.moves import (
    CELLS,
    RELOCATE,
    SUBSET,
    SUBSET_ITEMS,
    SWAP,
    TRIES,
    exchange_cells,
    exchange_items,
    fits,
    pick_subsets,
    put_in,
    random_cell,
    sum_items,
    take_out,
)
from planner.search.rescore import dense_cost, exchange_peak_sums


class Moves(NamedTuple):
    """How proposals are drawn; the shares not named here are swaps."""

    relocate: float
    cells: float
    subset: float
    reach: int
    """Swap partners lie within so many places in length order; 0: any trajectory."""
    targeted: float
    """Share of proposals from a costly row-shard to a cheap one."""
    tournament: int
    """Row-shards compared when targeted."""


class Best(NamedTuple):
    """The best layout that a chain has seen, by the exact score."""

    cell: np.ndarray
    """[trajectory] internal cell."""
    key: np.ndarray
    """(max_g U_g, sum_g U_g, max_rg J_rg) of Equation 16."""


@numba.njit(cache=True, nogil=True, inline="always")
def energy(shard_cost, spread):
    """(max_g U_g + spread * sum_g U_g) / (1 + spread): U_1 for a single shard.

    The primary score alone is blind to moves outside the slowest EDP shard.
    """
    largest = shard_cost[0]
    total = 0.0
    for value in shard_cost:
        largest = max(largest, value)
        total += value
    return (largest + spread * total) / (1.0 + spread)


@numba.njit(cache=True, nogil=True)
def keep_if_better(layout, best):
    """Exact lexicographic comparison with the incumbent (Equation 16)."""
    largest = layout.shard_cost.max()
    tolerance = 1e-9 * max(1.0, abs(best.key[0]))
    if largest > best.key[0] + tolerance:
        return
    total = layout.shard_cost.sum()
    tied = abs(largest - best.key[0]) <= tolerance
    if tied and total > best.key[1] + tolerance:
        return
    tied = tied and total >= best.key[1] - tolerance
    if tied and layout.row_cost.max() >= best.key[2] - tolerance:
        return
    best.key[0] = largest
    best.key[1] = total
    best.key[2] = layout.row_cost.max()
    best.cell[:] = layout.cell


@numba.njit(cache=True, nogil=True)
def anneal(
    problem, layout, best, random, moves, num_proposals, hot, cold, spread, reference, tally
):
    """Runs num_proposals from temperature `hot` to `cold` (geometric), in cost units.

    layout, best and random [1] are advanced. tally [3] float64 collects the path weight of Appendix
    E (energies measured from `reference`), the proposals that were feasible and those accepted.
    Returns the final energy.
    """
    num_slots = problem.shard_of_slot.shape[0]
    num_shards = problem.shard_start.shape[0] - 1
    num = layout.cell.shape[0]
    num_row_shards = layout.row_cost.shape[0]
    most_items = layout.items.shape[1]
    leaving_sum = np.empty(problem.demand.shape[1], np.int32)
    entering_sum = np.empty(problem.demand.shape[1], np.int32)
    sums_a = np.zeros(1 << SUBSET_ITEMS)
    sums_b = np.zeros(1 << SUBSET_ITEMS)
    moving = np.empty(2 * SUBSET_ITEMS, np.int32)
    current = energy(layout.shard_cost, spread)
    cooling = (cold / hot) ** (1.0 / max(1, num_proposals))
    temperature = hot
    for _ in range(num_proposals):
        tally[0] -= (1.0 / cooling - 1.0) / temperature * (current - reference)
        temperature *= cooling
        draw = random_unit(random)
        kind = SWAP
        if draw < moves.relocate:
            kind = RELOCATE
        elif draw < moves.relocate + moves.cells:
            kind = CELLS
        elif draw < moves.relocate + moves.cells + moves.subset:
            kind = SUBSET
        feasible = False
        i = j = num
        cell_a = cell_b = row_shard_a = row_shard_b = 0
        mask_a = mask_b = 0
        for _ in range(TRIES):
            row_shard_a = random_below(random, num_row_shards)
            row_shard_b = random_below(random, num_row_shards)
            if moves.targeted > 0 and random_unit(random) < moves.targeted:
                for _ in range(moves.tournament - 1):
                    other = random_below(random, num_row_shards)
                    if layout.row_cost[other] > layout.row_cost[row_shard_a]:
                        row_shard_a = other
                    other = random_below(random, num_row_shards)
                    if layout.row_cost[other] < layout.row_cost[row_shard_b]:
                        row_shard_b = other
            cell_a = random_cell(problem, row_shard_a, random)
            i = layout.items[cell_a, random_below(random, layout.num_items[cell_a])]
            if kind == SWAP and moves.reach > 0:
                place = problem.place[i] + random_below(random, 2 * moves.reach + 1) - moves.reach
                if place < 0 or place >= num:
                    continue
                j = problem.by_length[place]
                cell_b = layout.cell[j]
                row_shard_b = cell_b // num_slots * num_shards
                row_shard_b += problem.shard_of_slot[cell_b % num_slots]
            else:
                cell_b = random_cell(problem, row_shard_b, random)
                j = layout.items[cell_b, random_below(random, layout.num_items[cell_b])]
            if cell_a == cell_b:
                continue
            count_a = layout.num_items[cell_a]
            count_b = layout.num_items[cell_b]
            if kind == SWAP:
                change = problem.length[j] - problem.length[i]
                if change == 0 and row_shard_a == row_shard_b:
                    continue
                if fits(layout.tokens[cell_a], change, count_a, problem.capacity) and fits(
                    layout.tokens[cell_b], -change, count_b, problem.capacity
                ):
                    feasible = True
                    break
            elif kind == RELOCATE:
                if (
                    count_a > 1
                    and count_b < most_items
                    and layout.tokens[cell_b] + problem.length[i] <= problem.capacity
                ):
                    j = num
                    feasible = True
                    break
            elif kind == CELLS:
                if row_shard_a != row_shard_b and count_a + count_b > 2:
                    feasible = True
                    break
            elif (
                count_a <= SUBSET_ITEMS
                and count_b <= SUBSET_ITEMS
                and count_a + count_b > 2
                and row_shard_a != row_shard_b
                and most_items >= 2 * SUBSET_ITEMS
            ):
                mask_a, mask_b = pick_subsets(
                    problem, layout, random, cell_a, cell_b, sums_a, sums_b
                )
                if mask_a != 0 or mask_b != 0:
                    feasible = True
                    break
        if not feasible:
            continue
        tally[1] += 1.0
        leaving = problem.demand[i]
        entering = problem.demand[j]
        if kind in (SWAP, RELOCATE):
            tokens = problem.length[j] - problem.length[i]
            pairs = problem.pairs[j] - problem.pairs[i]
        else:
            whole = kind == CELLS
            out_tokens, out_pairs = sum_items(problem, layout, cell_a, mask_a, whole, leaving_sum)
            in_tokens, in_pairs = sum_items(problem, layout, cell_b, mask_b, whole, entering_sum)
            tokens = in_tokens - out_tokens
            pairs = in_pairs - out_pairs
            leaving = leaving_sum
            entering = entering_sum
        tokens_a, tokens_b = layout.tokens[cell_a], layout.tokens[cell_b]
        pairs_a, pairs_b = layout.pairs[cell_a], layout.pairs[cell_b]
        layout.tokens[cell_a] = tokens_a + tokens
        layout.tokens[cell_b] = tokens_b - tokens
        layout.pairs[cell_a] = pairs_a + pairs
        layout.pairs[cell_b] = pairs_b - pairs
        dense_a = dense_cost(problem, layout, row_shard_a)
        if row_shard_a == row_shard_b:
            dense_b = dense_a
            change_a = dense_a - layout.dense[row_shard_a]
            change_b = 0.0
            row_cost_a = layout.row_cost[row_shard_a] + change_a
            row_cost_b = row_cost_a
        else:
            dense_b = dense_cost(problem, layout, row_shard_b)
            peak_a, peak_b = exchange_peak_sums(
                layout.load[row_shard_a],
                layout.load[row_shard_b],
                leaving,
                entering,
                problem.ranks,
                problem.limit,
                problem.guarded,
            )
            row_cost_a = dense_a + peak_a * problem.unit
            row_cost_b = dense_b + peak_b * problem.unit
            change_a = row_cost_a - layout.row_cost[row_shard_a]
            change_b = row_cost_b - layout.row_cost[row_shard_b]
        shard_a = row_shard_a % num_shards
        shard_b = row_shard_b % num_shards
        shard_cost_a = layout.shard_cost[shard_a]
        shard_cost_b = layout.shard_cost[shard_b]
        layout.shard_cost[shard_a] += change_a
        layout.shard_cost[shard_b] += change_b
        proposed = energy(layout.shard_cost, spread)
        rise = proposed - current
        if rise > 0 and random_unit(random) >= math.exp(-rise / temperature):
            layout.shard_cost[shard_a] = shard_cost_a
            layout.shard_cost[shard_b] = shard_cost_b
            layout.tokens[cell_a], layout.tokens[cell_b] = tokens_a, tokens_b
            layout.pairs[cell_a], layout.pairs[cell_b] = pairs_a, pairs_b
            continue
        tally[2] += 1.0
        current = proposed
        layout.row_cost[row_shard_a] = row_cost_a
        layout.row_cost[row_shard_b] = row_cost_b
        layout.dense[row_shard_a] = dense_a
        layout.dense[row_shard_b] = dense_b
        if row_shard_a != row_shard_b:
            load_a = layout.load[row_shard_a]
            load_b = layout.load[row_shard_b]
            for k in range(load_a.shape[0]):
                change_k = entering[k] - leaving[k]
                load_a[k] += change_k
                load_b[k] -= change_k
        if kind == SWAP:
            layout.items[cell_a, layout.position[i]] = j
            layout.items[cell_b, layout.position[j]] = i
            layout.position[i], layout.position[j] = layout.position[j], layout.position[i]
            layout.cell[i], layout.cell[j] = cell_b, cell_a
        elif kind == RELOCATE:
            take_out(layout, i)
            put_in(layout, i, cell_b)
        elif kind == CELLS:
            exchange_cells(layout, cell_a, cell_b)
        else:
            exchange_items(layout, cell_a, cell_b, mask_a, mask_b, moving)
        if rise < 0:
            keep_if_better(layout, best)
    return current
