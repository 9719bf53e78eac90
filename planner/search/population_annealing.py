"""The paper's search: Population-SA over diverse fixed-row seeds (Section 4.1, Appendix E).

Kept as the reference that `pair_anneal` is measured against; both draw proposals with the same
kernel. A geometric schedule is cut into levels; every member anneals through a level, path weights
resample the population at its end, protected parents are kept once, and an archive holds the best
state of any chain by the exact score.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from planner.random_numbers import random_state
from planner.search.anneal import Best, Moves, anneal
from planner.search.diverse_seeds import NUM_TRIALS, canonical_form, seed_trials, select_diverse
from planner.search.found import Found
from planner.search.pair_anneal import compile_kernels, seed_key
from planner.search.rescore import Problem, layout_of, rebuild

NUM_SEEDS = 8
NUM_MEMBERS = 64
NUM_LEVELS = 2
NUM_PARENTS = 8
HOT, COLD = 1.1e-3, 1.1e-4  # in mean row costs
MOVES = Moves(relocate=0.2, cells=0.0, subset=0.0, reach=0, targeted=0.7, tournament=3)
TIMED_PROPOSALS = 2_000


class _Member:
    """One population member: its layout, its random numbers, its best and its path weight."""

    def __init__(self, problem: Problem, cell: np.ndarray, seed: int, number: int) -> None:
        self.layout = layout_of(problem, cell)
        self.random = random_state(seed, number)
        costs = self.layout.shard_cost
        key = np.array([costs.max(), costs.sum(), self.layout.row_cost.max()])
        self.best = Best(cell=self.layout.cell.copy(), key=key)
        self.tally = np.zeros(3)
        self.energy = float(costs.max())
        self.num_done = 0


def population_annealing(
    problem: Problem,
    seeds: list[np.ndarray],
    *,
    seed: int,
    num_threads: int,
    budget_seconds: float | None,
    budget_proposals: int | None,
) -> Found:
    """Searches the layouts of a fixed number of rows; arguments as for `pair_anneal`.

    budget_proposals is spread evenly over members and levels (the paper: 64 x 2 x 10,000); of
    budget_seconds every level gets its share, and members that come too late sit it out.
    """
    if budget_seconds is None and budget_proposals is None:
        raise ValueError("budget: give budget_seconds, budget_proposals or both")
    compile_kernels(problem, seeds[0])
    start = time.perf_counter()
    layouts = seed_trials(problem, seeds[0], NUM_TRIALS, seed) + seeds[1:]
    keys = [seed_key(problem, cell) for cell in layouts]
    selected = select_diverse(problem, layouts, keys, NUM_SEEDS)
    winner = selected[0]
    archive = Best(cell=np.array(layouts[winner], np.int32), key=np.array(keys[winner]))
    if problem.num_rows * len(problem.shard_of_slot) < 2:
        return _found(archive, 0, start)
    scale = keys[0][1] / (problem.num_rows * (len(problem.shard_start) - 1))
    members = [
        _Member(problem, layouts[selected[k % len(selected)]], seed, k) for k in range(NUM_MEMBERS)
    ]
    per_level = None
    if budget_proposals is not None:
        per_level = max(1, budget_proposals // (NUM_MEMBERS * NUM_LEVELS))
    if budget_seconds is not None:
        left = start + budget_seconds - time.perf_counter()
        affordable = int(left * _speed(problem, seeds[0], num_threads))
        affordable = max(1, affordable // (NUM_MEMBERS * NUM_LEVELS))
        per_level = affordable if per_level is None else min(per_level, affordable)
    assert per_level is not None
    reference = archive.key[0]
    temperatures = scale * np.geomspace(HOT, COLD, NUM_LEVELS + 1)
    rng = np.random.default_rng([seed, 1])
    for level in range(NUM_LEVELS):
        end = None
        if budget_seconds is not None:
            end = start + budget_seconds * (level + 1) / NUM_LEVELS

        def advance(member: _Member, level: int = level, end: float | None = end) -> None:
            member.tally[:] = 0.0
            if end is not None and time.perf_counter() > end:
                return
            member.num_done += per_level
            member.energy = anneal(
                problem,
                member.layout,
                member.best,
                member.random,
                MOVES,
                per_level,
                temperatures[level],
                temperatures[level + 1],
                1e-6,
                reference,
                member.tally,
            )

        _on_threads(advance, members, num_threads)
        for member in members:
            if tuple(member.best.key) < tuple(archive.key):
                archive.key[:] = member.best.key
                archive.cell[:] = member.best.cell
        if level + 1 < NUM_LEVELS:
            _resample(problem, members, rng)
    return _found(archive, sum(member.num_done for member in members), start)


def _found(archive: Best, num_proposals: int, start: float) -> Found:
    key = (float(archive.key[0]), float(archive.key[1]), float(archive.key[2]))
    seconds = time.perf_counter() - start
    return Found(cell=archive.cell, key=key, num_proposals=num_proposals, seconds=seconds)


def _speed(problem: Problem, cell: np.ndarray, num_threads: int) -> float:
    """Proposals per second of all threads together."""
    member = _Member(problem, cell, 0, 0)
    start = time.perf_counter()
    scale = member.layout.row_cost.mean()
    hot, cold = scale * HOT, scale * COLD
    arguments = (MOVES, TIMED_PROPOSALS, hot, cold, 0.0, 0.0, member.tally)
    anneal(problem, member.layout, member.best, member.random, *arguments)
    return num_threads * TIMED_PROPOSALS / max(time.perf_counter() - start, 1e-9)


def _on_threads(
    advance: Callable[[_Member], None], members: list[_Member], num_threads: int
) -> None:
    """Advances every member; a level ends with its slowest thread."""
    errors: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for member in members[first::num_threads]:
                advance(member)
        except BaseException as error:  # handed to the calling thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k,), daemon=True) for k in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def tempered_weights(log_weight: np.ndarray, num_parents: int) -> np.ndarray:
    """[member] resampling probabilities, flattened just enough.

    The tempering factor is the largest of 1, 0.8, 0.64, ... at which the expected number of
    distinct members in a multinomial draw reaches num_parents.
    """
    shifted = log_weight - log_weight.max()
    factor = 1.0
    for _ in range(60):
        weight = np.exp(factor * shifted)
        weight /= weight.sum()
        if (1.0 - (1.0 - weight) ** len(weight)).sum() >= num_parents:
            break
        factor *= 0.8
    return weight


def systematic_resample(weight: np.ndarray, num_drawn: int, offset: float) -> np.ndarray:
    """Indices drawn at equally spaced points of the cumulated weights; offset in [0, 1)."""
    points = (offset + np.arange(num_drawn)) / max(num_drawn, 1)
    return np.minimum(np.searchsorted(np.cumsum(weight), points, side="right"), len(weight) - 1)


def _resample(problem: Problem, members: list[_Member], rng: np.random.Generator) -> None:
    """Replaces the population by its protected parents and a systematic resample."""
    weight = tempered_weights(np.array([member.tally[0] for member in members]), NUM_PARENTS)
    parents: list[int] = []
    seen = set()
    for k in sorted(range(len(members)), key=lambda k: members[k].energy):
        form = canonical_form(problem, members[k].layout.cell)
        if form not in seen and len(parents) < NUM_PARENTS:
            seen.add(form)
            parents.append(k)
    drawn = systematic_resample(weight, len(members) - len(parents), rng.random())
    cells = [members[k].layout.cell.copy() for k in [*parents, *drawn]]
    for member, cell in zip(members, cells, strict=True):
        member.layout.cell[:] = cell
        rebuild(problem, member.layout)
