"""Rows of every policy: coverage, caps, no empty cell, equal rows; cases 2, 3, 4 and 9."""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import COST, jobs, window_of

from planner.packing.base_rows import deal_to_slots, dp_local_ffd, pack_slot
from planner.packing.bin_slack import (
    minimum_bin_slack,
    pack_by_slack,
    pack_by_slack_reference,
)
from planner.packing.first_fit import (
    best_fit_decreasing,
    cells_lower_bound,
    first_fit_decreasing,
    split_to_count,
)
from planner.packing.row_count import check_batch_size, most_rows, row_count
from planner.packing.slime_rows import largest_differencing, slime_rows
from planner.placement import Placement
from planner.policies import POLICIES
from planner.policy import PlannerOptions, make_plan, schedule
from planner.topology import Topology

QUICK = PlannerOptions(budget_seconds=None, budget_proposals=300, num_threads=1)
PAPER = PlannerOptions(rows="paper", budget_seconds=None, budget_proposals=300, num_threads=1)


@settings(max_examples=40, deadline=None)
@given(job=jobs())
def test_every_plan_of_every_policy_is_valid(job):
    window, topology = job
    carried = Placement.identity(window.num_layers, window.num_experts, topology.num_ep_ranks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for policy in POLICIES:
            try:
                plan = make_plan(window, topology, COST, carried, policy, PAPER)
            except ValueError as error:
                assert "too few trajectories" in str(error)
                return
            plan.validate(window, topology, carried)
            kept = plan.rows.kept
            assert plan.rows.num_dropped == window.num_trajectories - len(kept)
            assert (kept == np.arange(len(kept))).all()


def options_for(policy: str) -> PlannerOptions:
    return QUICK if policy in ("reschedule", "full") else PlannerOptions()


@pytest.mark.parametrize("policy", POLICIES)
def test_case_2_five_long_samples_on_dp_4_drop_the_last(policy):
    window = window_of([90] * 5)
    topology = Topology.uniform(dp=4, ep=4, capacity=100)
    carried = Placement.identity(3, 16, 4)
    plan = make_plan(window, topology, COST, carried, policy, options_for(policy))
    assert plan.rows.num_rows == 1
    assert plan.report["dropped"] == 1


def test_case_2_is_an_early_error_when_asked():
    window = window_of([90] * 5)
    topology = Topology.uniform(dp=4, ep=4, capacity=100)
    with pytest.raises(ValueError, match=r"5 trajectories .*cap 100 .*dp=4"):
        placement = Placement.identity(3, 16, 4)
        schedule(window, topology, COST, placement, "off", PlannerOptions(too_few="error"))


@pytest.mark.parametrize("policy", POLICIES)
def test_case_2_vpp_group_without_any_feasible_rows_is_an_error(policy):
    window = window_of([60] * 6)
    topology = Topology.uniform(dp=2, ep=4, capacity=100, vpp=2, microbatch_group=4, pp=2)
    with pytest.raises(ValueError, match=r"6 trajectories .*cap 100 .*vpp=2\) on dp=2"):
        schedule(window, topology, COST, Placement.identity(3, 16, 4), policy, QUICK)


@pytest.mark.parametrize("policy", POLICIES)
def test_case_3_no_cell_is_above_the_cap(policy):
    window = window_of([70] * 8)
    topology = Topology.uniform(dp=2, ep=4, capacity=80)
    options = PlannerOptions(
        slime_balance_data=True, budget_seconds=None, budget_proposals=300, num_threads=1
    )
    result = schedule(window, topology, COST, Placement.identity(3, 16, 4), policy, options)
    assert result.rows.num_rows == 4
    assert result.rows.cell_tokens(window.length).max() == 70


@pytest.mark.parametrize("policy", POLICIES)
def test_case_4_a_long_trajectory_is_alone_with_a_warning(policy):
    window = window_of([250, 40, 40, 40])
    topology = Topology.uniform(dp=2, ep=4, capacity=100)
    placement = Placement.identity(3, 16, 4)
    with pytest.warns(UserWarning, match="longer than the cell capacity of 100"):
        rows = schedule(window, topology, COST, placement, policy, QUICK).rows
    assert (rows.cell == rows.cell[0]).sum() == 1
    with pytest.raises(ValueError, match="max_tokens_per_gpu"):
        strict = PlannerOptions(long_trajectory="error")
        schedule(window, topology, COST, placement, policy, strict)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("lengths", [[50] * 7, [3, 3, 3, 1]])
def test_case_9_no_slot_stays_empty(policy, lengths):
    window = window_of(lengths)
    topology = Topology.uniform(dp=4, ep=4, capacity=100)
    rows = schedule(window, topology, COST, Placement.identity(3, 16, 4), policy, QUICK).rows
    assert rows.num_rows == 1
    assert rows.num_dropped == 0
    assert (np.bincount(rows.cell, minlength=4) > 0).all()


def test_whole_trailing_groups_are_dropped():
    window = window_of([90] * 10, group_size=4)
    topology = Topology.uniform(dp=4, ep=4, capacity=100)
    plan = schedule(window, topology, COST, Placement.identity(3, 16, 4), "base", PlannerOptions())
    assert plan.report["dropped"] == 2
    assert (plan.rows.cell[8:] == -1).all()


def test_rows_list_the_trajectories_of_a_cell_in_order():
    window = window_of([50] * 8)
    topology = Topology.uniform(dp=2, ep=4, capacity=100)
    rows = schedule(window, topology, COST, Placement.identity(3, 16, 4), "base", QUICK).rows
    seen = [rows.trajectories(row, slot) for row in range(rows.num_rows) for slot in range(2)]
    assert sorted(np.concatenate(seen).tolist()) == list(range(8))
    assert all((np.diff(members) > 0).all() for members in seen)


def test_base_deals_groups_to_slots_in_arrival_order():
    assert [m.tolist() for m in deal_to_slots(6, 2, 2)] == [[0, 1, 4, 5], [2, 3]]
    assert [m.tolist() for m in deal_to_slots(4, 3, 2)] == [[0, 3], [1], [2]]


def test_base_prefers_the_cell_with_fewest_trajectories():
    length = np.array([60, 50, 30, 10, 10])
    assert pack_slot(length, np.arange(5), 100) == [[0, 2, 4], [1, 3]]


def test_base_slots_with_fewer_cells_split_their_most_populated_cell():
    length = np.array([90, 90, 90, 40, 30, 20])
    rows = dp_local_ffd(length, 0, Topology.uniform(dp=2, ep=1, capacity=100), shard_size=3)
    assert rows is not None and rows.num_rows == 3
    assert (np.bincount(rows.cell, minlength=6) == 1).all()


def test_base_shuffles_equal_lengths_by_window():
    length = np.full(64, 40)
    topology = Topology.uniform(dp=2, ep=1, capacity=100)
    first, again, other = (dp_local_ffd(length, w, topology) for w in (0, 0, 1))
    assert (first.cell == again.cell).all()
    assert (first.cell != other.cell).any()


def test_slime_packs_first_fit_and_deals_strided():
    rows = slime_rows(np.array([60, 50, 30, 50, 10]), Topology.uniform(dp=2, ep=1, capacity=100))
    assert rows is not None and rows.num_rows == 1
    assert rows.cell.tolist() == [0, 1, 0, 1, 0]


def test_slime_halves_the_heaviest_bin_until_the_count_aligns():
    rows = slime_rows(np.array([60, 40, 90]), Topology.uniform(dp=3, ep=1, capacity=100))
    assert rows is not None
    assert rows.cell.tolist() == [0, 2, 1]


def test_slime_stops_where_slime_would():
    assert slime_rows(np.array([60, 90]), Topology.uniform(dp=3, ep=1, capacity=100)) is None


def test_largest_differencing_balances_equal_counts():
    parts = largest_differencing([8, 7, 6, 5], 2)
    assert sorted(map(tuple, parts)) == [(0, 3), (1, 2)]


@settings(max_examples=60, deadline=None)
@given(job=jobs())
def test_packings_respect_the_cap_and_the_bound(job):
    window, topology = job
    bound = cells_lower_bound(window.length, topology.capacity)
    for pack in (first_fit_decreasing, best_fit_decreasing):
        cell, num_cells = pack(window.length, topology.capacity)
        count = np.bincount(cell, minlength=num_cells)
        tokens = np.bincount(cell, window.length, num_cells)
        assert (count > 0).all() and len(count) == num_cells >= bound
        assert ((tokens <= topology.capacity) | (count == 1)).all()
    counted = row_count(window.length, topology)
    assert counted.bound <= counted.value
    assert counted.value % topology.row_multiple == 0
    if counted.value <= most_rows(window.num_trajectories, topology):
        target = counted.value * topology.num_dp_slots
        split = split_to_count(counted.cell, counted.num_cells, target, window.length)
        assert (np.bincount(split, minlength=target) > 0).all()


def test_l2_bound_beats_the_capacity_bound():
    assert cells_lower_bound(np.array([60, 60, 60, 45]), 100) == 4
    assert cells_lower_bound(np.array([250, 40, 40, 40]), 100) == 3
    assert cells_lower_bound(np.array([51] * 5), 100) == 5


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 130), min_size=1, max_size=14),
    most_added=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_bin_slack_equals_its_reference(lengths, most_added, seed):
    falling = np.sort(np.array(lengths))[::-1].copy()
    lost = np.random.default_rng(seed).integers(0, 9, len(falling))
    cell = np.empty(len(falling), np.int64)
    num_cells = pack_by_slack(falling, 100, most_added, 1_000_000, lost, cell)
    expected, num_expected = pack_by_slack_reference(falling, 100, most_added, lost)
    tokens = np.bincount(cell, falling, num_cells)
    count = np.bincount(cell, minlength=num_cells)
    assert num_cells == num_expected
    assert (cell == expected).all()
    assert ((tokens <= 100) | (count == 1)).all()


def test_bin_slack_closes_what_ffd_leaves_open():
    lengths = np.array([44, 24, 24, 22, 21, 17, 8, 8, 6, 6])
    assert first_fit_decreasing(lengths, 61)[1] == 4
    assert minimum_bin_slack(lengths, 61, 3)[1] == 3
    counted = row_count(lengths, Topology.uniform(dp=1, ep=1, capacity=61))
    assert (counted.value, counted.certified) == (3, True)


def test_case_2_is_refused_at_launch_by_its_sizes():
    topology = Topology.uniform(dp=2, ep=4, capacity=100, vpp=2, microbatch_group=4, pp=2)
    with pytest.raises(ValueError, match=r"6 trajectories .*dp=2 .*vpp=2, cap 100"):
        check_batch_size(6, topology)
    check_batch_size(8, topology)


@pytest.mark.parametrize(("dp", "num"), [(1, 9), (64, 200)])
def test_one_slot_and_many_slots(dp, num):
    window = window_of(np.random.default_rng(0).integers(20, 100, num))
    topology = Topology.uniform(dp=dp, ep=4, capacity=200)
    result = schedule(window, topology, COST, Placement.identity(3, 16, 4), "full", QUICK)
    count = np.bincount(result.rows.cell, minlength=result.rows.num_cells)
    assert (count > 0).all()
    assert result.report["J1_over_B"] <= result.report["J0_over_B"]
