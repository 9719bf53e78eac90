"""The default search: pair the FFD cells into rows, then anneal one independent chain per thread.

At least as good as the paper's population annealing at a fraction of the proposals, because a good
pairing leaves little for high temperatures to find. The best layout of all chains and seeds is kept
by the exact score, so that the result is never worse than the best seed. Deterministic for a seed,
a number of threads and a budget in proposals; a budget in seconds is anytime.
"""

from __future__ import annotations

import threading
import time

import numpy as np

from planner.random_numbers import random_state
from planner.search.anneal import Best, Moves, anneal, keep_if_better
from planner.search.found import Found
from planner.search.pair_start import pair_cells
from planner.search.rescore import Problem, layout_of, rebuild

# Tuned on synthetic:tiny and synthetic:flash; temperatures and rewards in mean row costs.
HOT, HOT_LONG, COLD = 1.1e-3, 1.5e-3, 1.7e-4
LONG_PROPOSALS = 10_000_000
PAIR_WINDOWS = (64, 32)
PAIR_REWARDS = (0.40, 0.33)
MOVES = (
    Moves(relocate=0.03, cells=0.03, subset=0.03, reach=120, targeted=0.0, tournament=1),
    Moves(relocate=0.05, cells=0.05, subset=0.25, reach=25, targeted=0.0, tournament=1),
)
SPREAD = 0.7
FIRST_SLICE, SLICE = 10_000, 50_000


def compile_kernels(problem: Problem, cell: np.ndarray) -> None:
    """Compiles or loads what the threads will call, so that no budget pays for it."""
    pair_cells(problem, cell, window=1, token_reward=0.0)
    layout = layout_of(problem, cell)
    best = Best(cell=layout.cell.copy(), key=np.zeros(3))
    random, tally = random_state(0, 0), np.zeros(3)
    anneal(problem, layout, best, random, MOVES[0], 0, 1.0, 0.5, SPREAD, 0.0, tally)


def seed_key(problem: Problem, cell: np.ndarray) -> tuple[float, float, float]:
    """The score of internal cells, from scratch."""
    layout = layout_of(problem, cell)
    costs = layout.shard_cost
    return (float(costs.max()), float(costs.sum()), float(layout.row_cost.max()))


def pair_anneal(
    problem: Problem,
    seeds: list[np.ndarray],
    *,
    seed: int,
    num_threads: int,
    budget_seconds: float | None,
    budget_proposals: int | None,
) -> Found:
    """Searches the layouts of a fixed number of rows.

    Args: seeds: feasible internal cells [trajectory], the first of which is paired; budgets:
    seconds of wall time and proposals over all chains, whichever ends first (at least one must be
    given).
    """
    if budget_seconds is None and budget_proposals is None:
        raise ValueError("budget: give budget_seconds, budget_proposals or both")
    compile_kernels(problem, seeds[0])
    start = time.perf_counter()
    deadline = None if budget_seconds is None else start + budget_seconds
    chains = [
        _Chain(problem, seeds, seed, number, num_threads, budget_proposals)
        for number in range(num_threads)
    ]
    threads = [
        threading.Thread(target=chain.run, args=(start, deadline), daemon=True) for chain in chains
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for chain in chains:
        if chain.error is not None:
            raise chain.error
    winner = min(chains, key=lambda chain: tuple(chain.best.key))
    return Found(
        cell=winner.best.cell,
        key=tuple(float(value) for value in winner.best.key),  # type: ignore[arg-type]
        num_proposals=sum(chain.num_done for chain in chains),
        seconds=time.perf_counter() - start,
    )


class _Chain:
    """One thread's chain: its start, its slices and its incumbent."""

    def __init__(
        self,
        problem: Problem,
        seeds: list[np.ndarray],
        seed: int,
        number: int,
        num_threads: int,
        budget_proposals: int | None,
    ) -> None:
        self.problem, self.seeds, self.number = problem, seeds, number
        self.random = random_state(seed, number)
        self.num_allowed = None if budget_proposals is None else -(-budget_proposals // num_threads)
        self.num_done = 0
        self.best: Best
        self.error: BaseException | None = None

    def run(self, start: float, deadline: float | None) -> None:
        try:
            self._run(start, deadline)
        except BaseException as error:  # handed to the calling thread
            self.error = error

    def _run(self, start: float, deadline: float | None) -> None:
        problem = self.problem
        keys = [seed_key(problem, cell) for cell in self.seeds]
        scale = keys[0][1] / (problem.num_rows * (len(problem.shard_start) - 1))
        variant = self.number % len(PAIR_WINDOWS)
        paired = pair_cells(
            problem,
            self.seeds[0],
            window=PAIR_WINDOWS[variant],
            token_reward=PAIR_REWARDS[variant] * scale,
        )
        keys.append(seed_key(problem, paired))
        cells = [*self.seeds, paired]
        first = min(range(len(cells)), key=lambda k: keys[k])
        self.best = Best(cell=np.array(cells[first], np.int32), key=np.array(keys[first]))
        if problem.num_rows * len(problem.shard_of_slot) < 2:
            return
        layout = layout_of(problem, cells[first])
        moves = MOVES[0 if _cells_are_small(layout.num_items) else 1]
        tally = np.zeros(3)
        annealing_start = time.perf_counter()
        speed = 1e6
        share = 0.0
        size = FIRST_SLICE
        while share < 1.0:
            if self.num_allowed is not None:
                size = min(size, self.num_allowed - self.num_done)
            if size <= 0:
                break
            expected = self._expected_total(speed, annealing_start, deadline)
            hot = HOT if expected <= LONG_PROPOSALS else HOT_LONG
            until = min(1.0, share + size / max(expected, size))
            anneal(
                problem,
                layout,
                self.best,
                self.random,
                moves,
                size,
                scale * hot * (COLD / hot) ** share,
                scale * hot * (COLD / hot) ** until,
                SPREAD,
                0.0,
                tally,
            )
            self.num_done += size
            now = time.perf_counter()
            speed = self.num_done / max(now - annealing_start, 1e-9)
            share = until
            if self.num_allowed is not None:
                share = self.num_done / self.num_allowed
            if deadline is not None:
                elapsed = (now - annealing_start) / max(deadline - annealing_start, 1e-9)
                share = max(share if self.num_allowed is not None else 0.0, elapsed)
            size = SLICE
            if deadline is not None:
                size = int(min(SLICE, max(1_000, speed * (deadline - now))))
            rebuild(problem, layout)
            keep_if_better(layout, self.best)

    def _expected_total(
        self, speed: float, annealing_start: float, deadline: float | None
    ) -> float:
        """Proposals that this chain will have drawn at the end of its budget."""
        limits = []
        if self.num_allowed is not None:
            limits.append(float(self.num_allowed))
        if deadline is not None:
            limits.append(max(1.0, speed * (deadline - annealing_start)))
        return min(limits)


def _cells_are_small(count: np.ndarray) -> bool:
    """Whether most cells hold one or two trajectories, so that subsets add little."""
    return float(count.mean()) < 1.5
