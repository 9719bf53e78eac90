"""The score of Equation 16, its bound, and the kernels that keep it incrementally."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import COST, jobs, not_worse, window_of

from planner.cost import CostModel, Stage
from planner.placement import Placement
from planner.random_numbers import random_state
from planner.rows import Rows
from planner.score import rank_demand, rank_demand_reference, score
from planner.search.anneal import Best, Moves, anneal
from planner.search.pair_anneal import pair_anneal
from planner.search.pair_start import pair_cells, paired_peak_sum
from planner.search.problem import search_problem
from planner.search.rescore import (
    NO_LIMIT,
    cells_from_internal,
    cells_to_internal,
    exchange_peak_sums,
    exchange_peak_sums_reference,
    flatten_demand,
    layout_of,
    peak_sum,
    peak_sum_reference,
    rebuild,
    rows_of,
)
from planner.topology import Topology

ALL_MOVES = Moves(relocate=0.2, cells=0.2, subset=0.3, reach=5, targeted=0.3, tournament=3)


def test_score_of_a_window_by_hand():
    window = window_of([11, 11], num_layers=1, num_experts=2, top_k=1)
    window.demand[:] = [[[10, 0]], [[4, 6]]]
    topology = Topology.uniform(dp=2, ep=2, capacity=20)
    cost = CostModel(stages=(Stage(name="a", alpha=2.0, beta=4.0),))
    placement = Placement.identity(1, 2, 2)
    one_row = Rows(cell=np.array([0, 1]), num_rows=1, num_dp_slots=2)
    result = score(window, one_row, topology, cost, placement)
    dense = 2.0 * 11 / 20 + 4.0 * (11 / 20) ** 2
    assert result.max_shard == pytest.approx(dense + 14 / 20)
    assert result.lower_bound == pytest.approx(dense + 14 / 20)
    assert result.global_excess == pytest.approx((14 - 10) / 10)
    assert result.row_local_excess == pytest.approx(0.0)
    assert result.token_utilization == pytest.approx(22 / 40)


def test_two_shards_pay_for_their_own_peaks():
    window = window_of([11, 11], num_layers=1, num_experts=2, top_k=1)
    window.demand[:] = [[[10, 0]], [[4, 6]]]
    topology = Topology.uniform(dp=2, ep=2, edp=2, capacity=20)
    placement = Placement.identity(1, 2, 2)
    rows = Rows(cell=np.array([0, 1]), num_rows=1, num_dp_slots=2)
    result = score(window, rows, topology, CostModel(), placement)
    assert result.key == pytest.approx((10 / 20, 16 / 20, 10 / 20))


@settings(max_examples=30, deadline=None)
@given(job=jobs(), seed=st.integers(0, 99))
def test_rank_demand_equals_its_reference(job, seed):
    window, topology = job
    rng = np.random.default_rng(seed)
    slots = np.stack([rng.permutation(window.num_experts) for _ in range(window.num_layers)])
    placement = Placement(expert_of_slot=slots, num_ep_ranks=topology.num_ep_ranks)
    q = rank_demand(window.demand, placement)
    assert (q == rank_demand_reference(window.demand, placement)).all()


@settings(max_examples=30, deadline=None)
@given(
    num_ranks=st.sampled_from([1, 2, 6, 16, 32]),
    num_layers=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_peak_kernels_equal_their_references(num_ranks, num_layers, seed):
    rng = np.random.default_rng(seed)
    vectors = flatten_demand(rng.integers(0, 1000, (4, num_layers, num_ranks)).astype(np.int32))
    ranks = (0,) * num_ranks
    guarded = vectors.shape[1] // 2 // (8 * num_ranks) * 8 * num_ranks
    for limit, part in ((NO_LIMIT, vectors.shape[1]), (900, vectors.shape[1]), (900, guarded)):
        expected = peak_sum_reference(vectors[0], num_ranks, limit, part)
        assert peak_sum(vectors[0], ranks, limit, part) == expected
        exchanged = exchange_peak_sums(*vectors[:4], ranks, limit, part)
        assert exchanged == exchange_peak_sums_reference(*vectors[:4], num_ranks, limit, part)
    both = peak_sum_reference(vectors[0] + vectors[1], num_ranks, NO_LIMIT, 0)
    assert paired_peak_sum(vectors[0], vectors[1], ranks) == both


def identity_for(window, topology):
    return Placement.identity(window.num_layers, window.num_experts, topology.num_ep_ranks)


@settings(max_examples=40, deadline=None)
@given(job=jobs(), seed=st.integers(0, 99))
def test_incremental_score_equals_the_score_from_scratch(job, seed):
    window, topology = job
    found = search_problem(window, topology, COST)
    if found is None:
        return
    problem, cell = found
    placement = identity_for(window, topology)
    layout = layout_of(problem, cell)
    key = np.array([layout.shard_cost.max(), layout.shard_cost.sum(), layout.row_cost.max()])
    best = Best(cell=layout.cell.copy(), key=key.copy())
    anneal(
        problem,
        layout,
        best,
        random_state(seed, 0),
        ALL_MOVES,
        2000,
        5.0,
        0.1,
        0.1,
        0.0,
        np.zeros(3),
    )
    for cells, expected in (
        (layout.cell, (layout.shard_cost.max(), layout.shard_cost.sum(), layout.row_cost.max())),
        (best.cell, tuple(best.key)),
    ):
        rows = rows_of(cells, problem, topology)
        result = score(window, rows, topology, COST, placement)
        assert result.key == pytest.approx(expected, rel=1e-9)
        assert result.max_shard >= result.lower_bound * (1 - 1e-9)
        count = np.bincount(rows.cell, minlength=rows.num_cells)
        tokens = rows.cell_tokens(window.length).ravel()
        assert (count > 0).all()
        assert ((tokens <= topology.capacity) | (count == 1)).all()
    assert not_worse(best.key, key)
    kept = [layout.load.copy(), layout.items.copy(), layout.num_items.copy(), layout.tokens.copy()]
    rebuild(problem, layout)
    assert (layout.load == kept[0]).all()
    assert (layout.num_items == kept[2]).all()
    assert (layout.tokens == kept[3]).all()


@settings(max_examples=20, deadline=None)
@given(job=jobs())
def test_pairing_keeps_cells_whole(job):
    window, topology = job
    found = search_problem(window, topology, COST)
    if found is None:
        return
    problem, cell = found
    sizes = {len(shard) for shard in topology.edp_shards}
    paired = pair_cells(problem, cell, window=8, token_reward=1.0)
    num_cells = problem.num_rows * topology.num_dp_slots
    same_before = cell[:, None] == cell[None]
    assert (same_before == (paired[:, None] == paired[None])).all()
    assert (np.bincount(paired, minlength=num_cells) > 0).all()
    assert sizes


@given(job=jobs())
@settings(max_examples=20, deadline=None)
def test_internal_cells_round_trip(job):
    _, topology = job
    cell = np.arange(3 * topology.num_dp_slots)
    internal = cells_to_internal(cell, topology)
    assert sorted(internal) == list(cell)
    assert (cells_from_internal(internal, topology) == cell).all()


def run(problem, cell, seed=0, num_threads=2, proposals=4000):
    return pair_anneal(
        problem,
        [cell],
        seed=seed,
        num_threads=num_threads,
        budget_seconds=None,
        budget_proposals=proposals,
    )


def test_search_is_deterministic_for_seed_and_threads():
    rng = np.random.default_rng(0)
    window = window_of(rng.integers(10, 100, 60), num_experts=16)
    topology = Topology.uniform(dp=4, ep=4, capacity=200)
    problem, cell = search_problem(window, topology, COST)
    first, again = run(problem, cell), run(problem, cell)
    assert (first.cell == again.cell).all() and first.key == again.key
    assert first.num_proposals == 4000
    assert (run(problem, cell, seed=1).cell != first.cell).any()


@settings(max_examples=20, deadline=None)
@given(job=jobs(), seed=st.integers(0, 99))
def test_search_is_never_worse_than_its_seed(job, seed):
    window, topology = job
    found = search_problem(window, topology, COST)
    if found is None:
        return
    problem, cell = found
    placement = identity_for(window, topology)
    result = run(problem, cell, seed=seed, num_threads=1, proposals=500)
    before = score(window, rows_of(cell, problem, topology), topology, COST, placement)
    after = score(window, rows_of(result.cell, problem, topology), topology, COST, placement)
    assert after.max_shard <= before.max_shard * (1 + 1e-9)


def test_a_budget_in_seconds_is_kept(monkeypatch):
    """By a clock that advances 10 ms at each reading."""
    rng = np.random.default_rng(0)
    window = window_of(rng.integers(10, 100, 60))
    topology = Topology.uniform(dp=4, ep=4, capacity=200)
    problem, cell = search_problem(window, topology, COST)
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: 0.01 * next(ticks))
    monkeypatch.setattr("planner.search.pair_anneal.time", clock)
    result = pair_anneal(
        problem, [cell], seed=0, num_threads=1, budget_seconds=0.2, budget_proposals=None
    )
    assert 0.2 <= result.seconds <= 0.25
    assert result.num_proposals > 0
