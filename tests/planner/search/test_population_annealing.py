"""The reference engine: seeds, canonical forms, resampling, and a result never below its seeds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import COST, jobs, not_worse, window_of

from planner.placement import Placement
from planner.policy import PlannerOptions, schedule
from planner.score import score
from planner.search.diverse_seeds import (
    canonical_form,
    co_assignment,
    seed_trials,
    select_diverse,
    window_shuffle,
)
from planner.search.pair_anneal import seed_key
from planner.search.population_annealing import (
    population_annealing,
    systematic_resample,
    tempered_weights,
)
from planner.search.problem import search_problem
from planner.search.rescore import rows_of
from planner.topology import Topology


@settings(max_examples=15, deadline=None)
@given(job=jobs(), seed=st.integers(0, 99))
def test_trials_are_feasible_and_distinct(job, seed):
    window, topology = job
    found = search_problem(window, topology, COST)
    if found is None:
        return
    problem, first = found
    layouts = seed_trials(problem, first, 4, seed)
    assert len({canonical_form(problem, cell) for cell in layouts}) == len(layouts)
    for cell in layouts:
        rows = rows_of(cell, problem, topology)
        count = np.bincount(rows.cell, minlength=rows.num_cells)
        tokens = rows.cell_tokens(window.length).ravel()
        assert (count > 0).all()
        assert ((tokens <= topology.capacity) | (count == 1)).all()
    keys = [seed_key(problem, cell) for cell in layouts]
    selected = select_diverse(problem, layouts, keys, 3)
    assert keys[selected[0]] == min(keys)
    assert len(set(selected)) == min(3, len(layouts))


@settings(max_examples=30, deadline=None)
@given(job=jobs(), seed=st.integers(0, 99))
def test_canonical_form_ignores_row_and_slot_order(job, seed):
    window, topology = job
    found = search_problem(window, topology, COST)
    if found is None:
        return
    problem, cell = found
    rng = np.random.default_rng(seed)
    num_slots = topology.num_dp_slots
    row_order = rng.permutation(problem.num_rows)
    slot_order = np.concatenate(
        [
            rng.permutation(np.arange(low, high))
            for low, high in zip(problem.shard_start[:-1], problem.shard_start[1:], strict=True)
        ]
    )
    row, slot = np.divmod(cell, num_slots)
    shuffled = (row_order[row] * num_slots + slot_order[slot]).astype(np.int32)
    assert canonical_form(problem, shuffled) == canonical_form(problem, cell)


def test_canonical_form_tells_cells_apart():
    window = window_of([60, 50, 40, 30])
    problem, _ = search_problem(window, Topology.uniform(dp=2, ep=2, capacity=100), COST)
    assert problem.num_rows == 1
    forms = [
        canonical_form(problem, np.array(c)) for c in ([0, 1, 0, 1], [0, 1, 1, 0], [1, 0, 1, 0])
    ]
    assert forms[0] == forms[2] != forms[1]


def test_window_shuffle_moves_places_by_less_than_its_width():
    order = np.arange(50)
    shuffled = window_shuffle(order, 4.0, np.random.default_rng(0))
    assert sorted(shuffled) == list(order)
    assert 0 < np.abs(np.argsort(shuffled) - order).max() < 4


def test_co_assignment_counts_pairs_split_apart():
    assert co_assignment(np.array([0, 0, 1, 1]), np.array([5, 5, 2, 2])) == 0.0
    assert co_assignment(np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])) == 1.0
    assert co_assignment(np.array([0, 1, 2]), np.array([0, 1, 2])) == 0.0


def test_weights_are_tempered_until_enough_parents_survive():
    steep = np.array([0.0] + [-1000.0] * 63)
    weight = tempered_weights(steep, 8)
    assert weight.sum() == pytest.approx(1.0)
    assert (1 - (1 - weight) ** 64).sum() >= 8
    assert tempered_weights(np.zeros(64), 8) == pytest.approx(np.full(64, 1 / 64))


def test_systematic_resampling_follows_the_weights():
    drawn = systematic_resample(np.array([0.5, 0.25, 0.25]), 8, 0.5)
    assert np.bincount(drawn).tolist() == [4, 2, 2]


@settings(max_examples=10, deadline=None)
@given(job=jobs(), seed=st.integers(0, 99))
def test_population_annealing_is_never_worse_than_its_seeds(job, seed):
    window, topology = job
    found = search_problem(window, topology, COST)
    if found is None:
        return
    problem, first = found
    result = population_annealing(
        problem, [first], seed=seed, num_threads=2, budget_seconds=None, budget_proposals=2560
    )
    assert not_worse(result.key, seed_key(problem, first))
    placement = Placement.identity(window.num_layers, window.num_experts, topology.num_ep_ranks)
    rows = rows_of(result.cell, problem, topology)
    assert score(window, rows, topology, COST, placement).key == pytest.approx(result.key)


def test_population_annealing_is_deterministic_and_an_engine():
    window = window_of(np.random.default_rng(0).integers(10, 100, 60))
    topology = Topology.uniform(dp=4, ep=4, capacity=200)
    options = PlannerOptions(
        engine="population_annealing", budget_seconds=None, budget_proposals=12_800
    )
    placement = Placement.identity(3, 16, 4)
    first, again = (schedule(window, topology, COST, placement, "full", options) for _ in range(2))
    assert (first.rows.cell == again.rows.cell).all()
    assert first.report["proposals"] == 12_800
