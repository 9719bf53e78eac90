"""Diverse fixed-row initialization (Section 4.1, Appendix E.1, Algorithm 3).

Two seeds are always kept: the FFD layout and the EDP-aware pairing of its cells. Further trials
perturb the nonincreasing length order (WindowShuffle), let RandomizedBestFit choose among the most
occupied cells that fit, and pair the completed cells by their incremental EDP-rank peaks; trials
that leave the feasible set are discarded. Selection starts from the exact-score winner and trades
distance from the selected against the gap in score.
"""

from __future__ import annotations

import numba
import numpy as np

from planner.packing.first_fit import split_to_count
from planner.random_numbers import random_below, random_state
from planner.search.pair_start import pair_cells
from planner.search.rescore import Problem, layout_of

NUM_TRIALS = 12
NUM_CHOICES = 3
LARGEST_SHUFFLE = 16
NUM_PROJECTIONS = 16
DISTANCE_WEIGHT = 0.5
Key = tuple[float, float, float]


@numba.njit(cache=True, nogil=True)
def randomized_best_fit(length, order, num_cells, capacity, num_choices, random, cell):
    """Each trajectory, in order, into a random one of the num_choices fullest cells that fit.

    A new cell opens when none fits. Fills cell [trajectory]; returns the number of cells used, or
    -1 when more than num_cells would be needed.
    """
    load = np.zeros(num_cells)
    fullest = np.empty(num_choices, np.int64)
    used = 0
    for i in order:
        num_fit = 0
        for k in range(used):
            if load[k] + length[i] > capacity:
                continue
            at = num_fit
            if num_fit < num_choices:
                num_fit += 1
            else:
                at = num_choices - 1
                if load[fullest[at]] >= load[k]:
                    continue
            while at > 0 and load[fullest[at - 1]] < load[k]:
                fullest[at] = fullest[at - 1]
                at -= 1
            fullest[at] = k
        if num_fit > 0:
            chosen = fullest[random_below(random, num_fit)]
        elif used == num_cells:
            return -1
        else:
            chosen = used
            used += 1
        load[chosen] += length[i]
        cell[i] = chosen
    return used


def window_shuffle(by_length: np.ndarray, width: float, rng: np.random.Generator) -> np.ndarray:
    """by_length with every place moved later by up to `width` places."""
    places = np.arange(len(by_length)) + rng.uniform(0.0, width, len(by_length))
    return by_length[np.argsort(places, kind="stable")]


def canonical_form(problem: Problem, cell: np.ndarray) -> bytes:
    """Equal for layouts that differ in row order or in the order of slots inside an EDP shard."""
    num_slots = len(problem.shard_of_slot)
    row, slot = np.divmod(np.asarray(cell, np.int64), num_slots)
    shard = problem.shard_of_slot[slot]
    first = np.full(problem.num_rows * num_slots, len(cell))
    np.minimum.at(first, cell, np.arange(len(cell)))
    first_of_row = first.reshape(problem.num_rows, num_slots).min(axis=1)
    row_rank = np.argsort(np.argsort(first_of_row))
    slot_rank = np.empty(problem.num_rows * num_slots, np.int64)
    by_row = first.reshape(problem.num_rows, num_slots)
    for g in range(len(problem.shard_start) - 1):
        low, high = problem.shard_start[g], problem.shard_start[g + 1]
        ranks = np.argsort(np.argsort(by_row[:, low:high], axis=1), axis=1)
        for k in range(low, high):
            slot_rank[np.arange(problem.num_rows) * num_slots + k] = ranks[:, k - low]
    canonical = (row_rank[row] * num_slots + problem.shard_start[shard] + slot_rank[cell]).astype(
        np.int32
    )
    return canonical.tobytes()


def seed_trials(
    problem: Problem, first: np.ndarray, num_trials: int, seed: int
) -> list[np.ndarray]:
    """Feasible internal cells: FFD, its pairing, and distinct ones from the trials."""
    num_cells = problem.num_rows * len(problem.shard_of_slot)
    length = problem.length[:-1]
    rng = np.random.default_rng(seed)
    random = random_state(seed, 1_000_000)
    layouts = [first, _paired(problem, first)]
    for _ in range(num_trials):
        width = float(rng.integers(2, LARGEST_SHUFFLE + 1))
        order = window_shuffle(problem.by_length, width, rng)
        cell = np.full(len(length), -1, np.int64)
        used = randomized_best_fit(
            length, order, num_cells, problem.capacity, NUM_CHOICES, random, cell
        )
        filled = None if used < 0 else split_to_count(cell, used, num_cells, length)
        if filled is not None:
            layouts.append(_paired(problem, filled))
    distinct = {canonical_form(problem, cell): cell for cell in reversed(layouts)}
    return list(reversed(distinct.values()))


def _paired(problem: Problem, cell: np.ndarray) -> np.ndarray:
    """Cells paired by incremental EDP-rank peaks over the (at most 512 longest) remaining cells."""
    return pair_cells(problem, cell, window=512, token_reward=0.0)


def row_features(problem: Problem, cell: np.ndarray) -> np.ndarray:
    """H(x) [row-shard, feature]: tokens, token pairs and load per EP rank, each over its mean."""
    layout = layout_of(problem, cell)
    num_row_shards = len(layout.row_cost)
    num_slots = len(problem.shard_of_slot)
    shards = len(problem.shard_start) - 1
    row, slot = np.divmod(np.arange(len(layout.tokens)), num_slots)
    row_shard = row * shards + problem.shard_of_slot[slot]
    tokens = np.bincount(row_shard, layout.tokens, num_row_shards)
    pairs = np.bincount(row_shard, layout.pairs, num_row_shards)
    num_ranks = len(problem.ranks)
    lanes = 8 if num_ranks <= 16 else 1
    load = layout.load.reshape(num_row_shards, -1, num_ranks, lanes).sum(axis=(1, 3))
    features = np.column_stack([tokens, pairs, load]).astype(np.float64)
    return features / np.maximum(features.mean(axis=0), 1e-12)


def co_assignment(a: np.ndarray, b: np.ndarray) -> float:
    """Share of pairs that are together in one grouping [trajectory] but not in the other."""
    together = _num_pairs(np.unique(a.astype(np.int64) * (b.max() + 1) + b, return_counts=True)[1])
    either = max(
        _num_pairs(np.unique(a, return_counts=True)[1]),
        _num_pairs(np.unique(b, return_counts=True)[1]),
    )
    return 1.0 - together / either if either else 0.0


def _num_pairs(counts: np.ndarray) -> int:
    return int((counts * (counts - 1) // 2).sum())


def select_diverse(
    problem: Problem, layouts: list[np.ndarray], keys: list[Key], num_selected: int
) -> list[int]:
    """Indices of the selected layouts, the exact-score winner first."""
    num_slots = len(problem.shard_of_slot)
    rng = np.random.default_rng(0)
    features = [row_features(problem, cell) for cell in layouts]
    directions = rng.standard_normal((features[0].shape[1], NUM_PROJECTIONS))
    directions /= np.linalg.norm(directions, axis=0)
    sketches = [np.sort(feature @ directions, axis=0) for feature in features]
    rows = [cell // num_slots for cell in layouts]

    def distance(x: int, y: int) -> float:
        sliced = np.abs(sketches[x] - sketches[y]).mean()
        cells = co_assignment(layouts[x], layouts[y])
        return float(sliced + 0.5 * (cells + co_assignment(rows[x], rows[y])))

    gap = np.array([key[0] for key in keys]) - min(key[0] for key in keys)
    gap /= max(gap.max(), 1e-12)
    selected = [min(range(len(layouts)), key=lambda k: keys[k])]
    nearest = np.full(len(layouts), np.inf)
    while len(selected) < min(num_selected, len(layouts)):
        for k in range(len(layouts)):
            nearest[k] = min(nearest[k], distance(k, selected[-1]))
        worth = DISTANCE_WEIGHT * nearest / max(nearest.max(), 1e-12)
        worth -= (1.0 - DISTANCE_WEIGHT) * gap
        worth[selected] = -np.inf
        selected.append(int(np.argmax(worth)))
    return selected
