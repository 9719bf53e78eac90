"""1F1B: the simulation against a brute-force event simulation, row counts and row order."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import COST, window_of

from planner.packing.row_count import row_count
from planner.packing.slime_rows import slime_rows
from planner.pipeline_sim import makespan, simulate, simulate_events
from planner.placement import Placement
from planner.policy import PlannerOptions, make_plan, place, schedule
from planner.rows import Rows
from planner.search.row_choice import candidate_rows
from planner.search.row_order import best_row_order, reordered, valley
from planner.topology import Topology


@settings(max_examples=120, deadline=None)
@given(
    num_ranks=st.integers(1, 4),
    num_chunks=st.integers(1, 3),
    group=st.integers(1, 4),
    num_groups=st.integers(1, 4),
    seed=st.integers(0, 999),
)
def test_simulation_equals_the_event_simulation(num_ranks, num_chunks, group, num_groups, seed):
    rng = np.random.default_rng(seed)
    num_rows = group * num_groups
    forward = rng.integers(1, 9, num_rows).astype(float)
    backward = rng.integers(1, 9, num_rows).astype(float)
    expected = simulate_events(forward, backward, num_ranks, num_chunks, group)
    assert simulate(forward, backward, num_ranks, num_chunks, group) == expected


@pytest.mark.parametrize("pp", [2, 4])
def test_equal_rows_cost_the_known_bubble(pp):
    row_cost = np.full((8, 1), 3.0)
    topology = Topology.uniform(dp=1, ep=1, capacity=1, pp=pp)
    assert makespan(row_cost, topology) == pytest.approx((8 + pp - 1) * 3.0 / pp)


def test_interleaving_shrinks_the_bubble():
    row_cost = np.full((8, 1), 3.0)
    topology = Topology.uniform(dp=1, ep=1, capacity=1, pp=4, vpp=2, microbatch_group=4)
    assert makespan(row_cost, topology) == pytest.approx((8 + (4 - 1) / 2) * 3.0 / 4)


def test_without_a_pipeline_the_makespan_is_the_slowest_shard():
    topology = Topology.uniform(dp=2, ep=1, edp=2, capacity=1)
    assert makespan(np.array([[1.0, 2.0], [5.0, 1.0]]), topology) == 6.0


def test_rows_that_do_not_fit_the_group_are_refused():
    topology = Topology.uniform(dp=1, ep=1, capacity=1, pp=2, vpp=2, microbatch_group=2)
    with pytest.raises(ValueError, match="multiple of 2"):
        makespan(np.ones((3, 1)), topology)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), pp=st.integers(2, 4))
def test_row_order_is_near_the_best_of_all_orders(seed, pp):
    row_cost = np.random.default_rng(seed).integers(1, 30, (6, 2)).astype(float)
    topology = Topology.uniform(dp=2, ep=1, edp=2, capacity=1, pp=pp)
    order = best_row_order(row_cost, topology)
    assert sorted(order) == list(range(6))
    found = makespan(row_cost, topology, order)
    orders = (np.array(order) for order in itertools.permutations(range(6)))
    least = min(makespan(row_cost, topology, order) for order in orders)
    assert found <= makespan(row_cost, topology)
    assert found <= least * 1.15


def test_valley_puts_cheap_rows_at_both_ends():
    assert valley(np.array([5.0, 1.0, 3.0, 2.0])).tolist() == [1, 2, 0, 3]


def test_reordered_rows_keep_their_cells():
    rows = Rows(cell=np.array([0, 1, 2, 3, -1]), num_rows=2, num_dp_slots=2)
    assert reordered(rows, np.array([1, 0])).cell.tolist() == [2, 3, 0, 1, -1]


def options(**more):
    return PlannerOptions(budget_seconds=None, budget_proposals=2000, num_threads=1, **more)


@pytest.mark.parametrize("vpp", [1, 2])
@pytest.mark.parametrize("num", [12, 30, 64])
def test_makespan_mode_is_never_slower_than_slime_or_base(num, vpp):
    window = window_of(np.random.default_rng(num).integers(20, 100, num))
    topology = Topology.uniform(dp=2, ep=4, capacity=200, pp=4, vpp=vpp, microbatch_group=2)
    placement = Placement.identity(3, 16, 4)
    times = {}
    for policy in ("off", "base", "reschedule"):
        result = schedule(window, topology, COST, placement, policy, options())
        times[policy] = result.report["makespan"]
        assert result.rows.num_rows % topology.row_multiple == 0
    assert times["reschedule"] <= min(times["off"], times["base"]) * (1 + 1e-9)


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 999),
    num=st.integers(12, 40),
    pp=st.sampled_from([1, 4]),
    placement=st.sampled_from(["identity", "random"]),
    stop=st.sampled_from(["cv", "net_benefit"]),
    rows_from=st.sampled_from(["slime", "dp_local_ffd"]),
)
def test_full_is_never_slower_than_reschedule_or_reroute(seed, num, pp, placement, stop, rows_from):
    rng = np.random.default_rng(seed)
    window = window_of(rng.integers(20, 100, num), seed=seed)
    topology = Topology.uniform(dp=2, ep=4, capacity=200, pp=pp)
    carried = Placement.identity(3, 16, 4)
    if placement == "random":
        slots = np.stack([rng.permutation(16) for _ in range(3)])
        carried = Placement(expert_of_slot=slots, num_ep_ranks=4)
    chosen = options(stop=stop, rows_from=rows_from)
    time = {
        policy: make_plan(window, topology, COST, carried, policy, chosen).report["makespan"]
        for policy in ("reschedule", "reroute", "full")
    }
    assert time["full"] <= time["reschedule"]
    assert time["full"] <= time["reroute"] * (1 + 1e-9)


def test_full_moves_nothing_where_the_carried_placement_is_as_fast():
    """Loads that promise a saving which the trajectories' own demand does not hold."""
    window = window_of([50] * 8, num_layers=3, num_experts=16)
    window.demand[:] = 6
    window.expert_load[:] = [9, 9, 9, 9] + [1] * 12
    topology = Topology.uniform(dp=2, ep=4, capacity=100)
    carried = Placement.identity(3, 16, 4)
    assert place(window, topology, carried, "full", options()).num_moved > 0
    plan = make_plan(window, topology, COST, carried, "full", options())
    assert plan.report["moved_experts"] == 0
    assert plan.notes["stop_reason"] == "carried_is_faster"
    assert plan.placement is carried


@pytest.mark.parametrize("rows", ["paper", "makespan"])
@pytest.mark.parametrize("num", [12, 30, 64])
def test_searched_rows_are_never_worse_than_fixed_rows_of_the_same_number(num, rows):
    window = window_of(np.random.default_rng(num).integers(20, 100, num))
    topology = Topology.uniform(dp=2, ep=4, capacity=200)
    placement = Placement.identity(3, 16, 4)
    few = PlannerOptions(rows=rows, budget_seconds=None, budget_proposals=1, num_threads=1)
    full = schedule(window, topology, COST, placement, "full", few)
    for policy in ("off", "base"):
        fixed = schedule(window, topology, COST, placement, policy, few)
        if rows == "makespan" or fixed.rows.num_rows == full.rows.num_rows:
            assert full.report["joint_cost"] <= fixed.report["joint_cost"] * (1 + 1e-9)


def test_paper_mode_raises_rows_to_the_pipeline_floor():
    window = window_of([90] * 24)
    topology = Topology.uniform(dp=2, ep=4, capacity=400, pp=4)
    placement = Placement.identity(3, 16, 4)
    paper = schedule(window, topology, COST, placement, "full", options(rows="paper"))
    assert paper.rows.num_rows == 8
    assert paper.report["rows_bound"] == 3


def test_without_a_pipeline_rows_stay_at_the_fewest():
    window = window_of(np.random.default_rng(0).integers(20, 100, 64))
    topology = Topology.uniform(dp=4, ep=4, capacity=200)
    counted = row_count(window.length, topology)
    assert candidate_rows(counted, 64, topology) == [counted.value]
    rows = schedule(window, topology, COST, Placement.identity(3, 16, 4), "full", options()).rows
    slime = slime_rows(window.length, topology)
    assert rows.num_rows == counted.value <= slime.num_rows
