"""The replica oracle is a floor under expert balance; CP-SAT's bound is a bound."""

import builtins
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.baselines import replica_oracle, solve_cp_sat
from planner.cost import CostModel, Stage
from planner.placement import Placement
from planner.rows import Rows
from planner.score import rank_demand, score, score_rank_demand
from planner.topology import Topology
from planner.window import Window

COST = CostModel(
    stages=(Stage(name="linear", alpha=3.0), Stage(name="attention", alpha=1.0, beta=2.0))
)


def make_window(num, seed, *, layers=2, experts=4, top_k=2, long=60):
    rng = np.random.default_rng(seed)
    length = rng.integers(10, long, num)
    share = rng.dirichlet(np.full(experts, 0.4), (num, layers))
    demand = np.stack([rng.multinomial(length[i] * top_k, share[i]) for i in range(num)])
    return Window(window_id=0, length=length, routed_rows=length, demand=demand, top_k=top_k)


def one_each(num, dp):
    return Rows(cell=np.arange(num), num_rows=num // dp, num_dp_slots=dp)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 999), st.sampled_from([(4, 1), (4, 2), (2, 1)]))
def test_no_placement_is_below_the_replica_oracle(seed, shape):
    dp, edp = shape
    window = make_window(8, seed)
    topology = Topology.uniform(dp=dp, ep=2, capacity=100, edp=edp)
    rows = one_each(8, dp)
    oracle = replica_oracle(window, rows, topology, COST)
    for expert_of_slot in itertools.permutations(range(4)):
        placement = Placement(expert_of_slot=np.array([expert_of_slot] * 2), num_ep_ranks=2)
        scored = score(window, rows, topology, COST, placement)
        assert scored.max_shard >= oracle.max_shard - 1e-9
        assert scored.expert >= oracle.expert - 1e-9
        assert scored.dense == pytest.approx(oracle.dense)


def test_the_oracle_is_reached_when_demand_is_even():
    window = Window(
        window_id=0,
        length=np.array([8, 8]),
        routed_rows=np.array([8, 8]),
        demand=np.full((2, 3, 4), 4),
        top_k=2,
    )
    topology = Topology.uniform(dp=2, ep=2, capacity=10)
    rows = one_each(2, 2)
    scored = score(window, rows, topology, COST, Placement.identity(3, 4, 2))
    oracle = replica_oracle(window, rows, topology, COST)
    assert oracle.key == pytest.approx(scored.key)


def test_cp_sat_without_or_tools_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("ortools"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    window = make_window(4, 0)
    q = rank_demand(window.demand, Placement.identity(2, 4, 2))
    with pytest.raises(ImportError, match="pip install ortools"):
        solve_cp_sat(
            window.length, q, one_each(4, 2), Topology.uniform(dp=2, ep=2, capacity=99), COST
        )


@pytest.mark.parametrize("edp, groups, seed", [(1, 1, 0), (2, 1, 1), (1, 2, 2), (1, 1, 3)], ids=str)
def test_cp_sat_equals_brute_force_on_a_small_window(edp, groups, seed):
    pytest.importorskip("ortools")
    window = make_window(6, seed)
    topology = Topology.uniform(dp=2, ep=2, capacity=100, edp=edp, ep_groups_per_shard=groups)
    q = rank_demand(window.demand, Placement.identity(2, 4, 2))

    def joint(cell):
        rows = Rows(cell=np.array(cell), num_rows=2, num_dp_slots=2)
        return score_rank_demand(window.length, q, rows, topology, COST).max_shard

    feasible = [
        cell
        for cell in itertools.product(range(4), repeat=6)
        if len(set(cell)) == 4 and np.bincount(cell, window.length, 4).max() <= topology.capacity
    ]
    best = min(map(joint, feasible))
    hint = Rows(cell=np.array(max(feasible, key=joint)), num_rows=2, num_dp_slots=2)
    result = solve_cp_sat(window.length, q, hint, topology, COST, seconds=20)
    assert result.status == "OPTIMAL"
    assert joint(result.rows.cell) == pytest.approx(best, abs=0.01)
    assert result.bound <= best + 1e-9 and result.bound >= best - 0.05


def test_cp_sat_keeps_a_long_trajectory_alone_and_refuses_dropped_ones():
    pytest.importorskip("ortools")
    window = make_window(5, 4, long=40)
    length = window.length.copy()
    length[0] = 250
    q = rank_demand(window.demand, Placement.identity(2, 4, 2))
    topology = Topology.uniform(dp=2, ep=2, capacity=100)
    hint = Rows(cell=np.array([0, 1, 1, 2, 3]), num_rows=2, num_dp_slots=2)
    result = solve_cp_sat(length, q, hint, topology, COST, seconds=10)
    assert (result.rows.cell == result.rows.cell[0]).sum() == 1
    dropped = Rows(cell=np.array([0, 1, 1, 2, -1]), num_rows=2, num_dp_slots=2)
    with pytest.raises(ValueError, match="hint: 1 of 5"):
        solve_cp_sat(length, q, dropped, topology, COST)
