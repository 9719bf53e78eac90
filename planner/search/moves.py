"""The moves of a search: what is picked, what it adds up to, and how a layout takes it.

All keep a layout feasible: no cell above C but a single long trajectory, none empty.
"""

from __future__ import annotations

import numba

from planner.random_numbers import random_below

SWAP, RELOCATE, CELLS, SUBSET = 0, 1, 2, 3
TRIES = 8
SUBSET_ITEMS = 5


@numba.njit(cache=True, nogil=True, inline="always")
def subset_tokens(problem, layout, cell, sums):
    """sums[mask] = tokens of the masked items of a cell, for all masks; returns the full mask."""
    size = 1
    for k in range(layout.num_items[cell]):
        tokens = problem.length[layout.items[cell, k]]
        for mask in range(size):
            sums[size + mask] = sums[mask] + tokens
        size *= 2
    return size - 1


@numba.njit(cache=True, nogil=True, inline="always")
def pick_subsets(problem, layout, random, cell_a, cell_b, sums_a, sums_b):
    """Two random subsets (bit masks) whose exchange fits both caps; (0, 0) when there are none.

    Exchanges that move nothing, everything, or a whole cell onto the other do not count.
    """
    full_a = subset_tokens(problem, layout, cell_a, sums_a)
    full_b = subset_tokens(problem, layout, cell_b, sums_b)
    room_a = problem.capacity - layout.tokens[cell_a]
    room_b = problem.capacity - layout.tokens[cell_b]
    found = 0
    for mask_b in range(full_b + 1):
        edge = 1 if mask_b == 0 or mask_b == full_b else 0
        least = sums_b[mask_b] - room_a
        most = sums_b[mask_b] + room_b
        for mask_a in range(edge, full_a + 1 - edge):
            found += sums_a[mask_a] >= least and sums_a[mask_a] <= most
    picked_a = 0
    picked_b = 0
    if found > 0:
        left = random_below(random, found)
        for mask_b in range(full_b + 1):
            edge = 1 if mask_b == 0 or mask_b == full_b else 0
            least = sums_b[mask_b] - room_a
            most = sums_b[mask_b] + room_b
            for mask_a in range(edge, full_a + 1 - edge):
                if sums_a[mask_a] >= least and sums_a[mask_a] <= most:
                    if left == 0:
                        picked_a, picked_b = mask_a, mask_b
                    left -= 1
            if left < 0:
                break
    return picked_a, picked_b


@numba.njit(cache=True, nogil=True, inline="always")
def sum_items(problem, layout, cell, mask, whole, total):
    """Adds up the masked (or all) items of a cell: demand into total; returns (tokens, pairs)."""
    total[:] = 0
    tokens = 0.0
    pairs = 0.0
    for k in range(layout.num_items[cell]):
        if whole or (mask >> k) & 1:
            i = layout.items[cell, k]
            tokens += problem.length[i]
            pairs += problem.pairs[i]
            for x in range(total.shape[0]):
                total[x] += problem.demand[i, x]
    return tokens, pairs


@numba.njit(cache=True, nogil=True, inline="always")
def take_out(layout, i):
    """Removes a trajectory from the items of its cell."""
    cell = layout.cell[i]
    layout.num_items[cell] -= 1
    last = layout.items[cell, layout.num_items[cell]]
    layout.items[cell, layout.position[i]] = last
    layout.position[last] = layout.position[i]


@numba.njit(cache=True, nogil=True, inline="always")
def put_in(layout, i, cell):
    layout.items[cell, layout.num_items[cell]] = i
    layout.position[i] = layout.num_items[cell]
    layout.num_items[cell] += 1
    layout.cell[i] = cell


@numba.njit(cache=True, nogil=True, inline="always")
def exchange_items(layout, cell_a, cell_b, mask_a, mask_b, moving):
    """Exchanges the masked items of two small cells; moving is scratch [2 * SUBSET_ITEMS]."""
    num_a = 0
    for k in range(layout.num_items[cell_a]):
        if (mask_a >> k) & 1:
            moving[num_a] = layout.items[cell_a, k]
            num_a += 1
    num = num_a
    for k in range(layout.num_items[cell_b]):
        if (mask_b >> k) & 1:
            moving[num] = layout.items[cell_b, k]
            num += 1
    for k in range(num):
        take_out(layout, moving[k])
    for k in range(num):
        put_in(layout, moving[k], cell_b if k < num_a else cell_a)


@numba.njit(cache=True, nogil=True, inline="always")
def exchange_cells(layout, cell_a, cell_b):
    for k in range(max(layout.num_items[cell_a], layout.num_items[cell_b])):
        a = layout.items[cell_a, k]
        layout.items[cell_a, k] = layout.items[cell_b, k]
        layout.items[cell_b, k] = a
    count = layout.num_items[cell_a]
    layout.num_items[cell_a] = layout.num_items[cell_b]
    layout.num_items[cell_b] = count
    for k in range(layout.num_items[cell_a]):
        layout.cell[layout.items[cell_a, k]] = cell_a
    for k in range(layout.num_items[cell_b]):
        layout.cell[layout.items[cell_b, k]] = cell_b


@numba.njit(cache=True, nogil=True, inline="always")
def random_cell(problem, row_shard, random):
    """A random internal cell of a row-shard."""
    num_shards = problem.shard_start.shape[0] - 1
    shard = row_shard % num_shards
    first = problem.shard_start[shard]
    slot = first + random_below(random, problem.shard_start[shard + 1] - first)
    return row_shard // num_shards * problem.shard_of_slot.shape[0] + slot


@numba.njit(cache=True, nogil=True, inline="always")
def fits(tokens, change, count, capacity):
    """Whether a cell may change by so many tokens; one alone may be any length."""
    return tokens + change <= capacity or count == 1
