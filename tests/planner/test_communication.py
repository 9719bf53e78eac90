"""DeepEP's deduplicated copies, traffic figures, and the terms that the search can take in."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import COST, window_of

from planner.communication import fan_out, fan_out_reference, slot_share, traffic
from planner.placement import Placement
from planner.policy import PlannerOptions, schedule
from planner.rows import Rows
from planner.score import rank_demand
from planner.topology import Topology


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), num_ranks=st.sampled_from([1, 2, 4]))
def test_fan_out_equals_its_reference(seed, num_ranks):
    rng = np.random.default_rng(seed)
    starts = np.concatenate([[0], np.cumsum(rng.integers(0, 6, 4))])
    routed = np.argsort(rng.random((starts[-1], 3, 8)), axis=2)[:, :, :3].astype(np.uint8)
    slots = np.stack([rng.permutation(8) for _ in range(3)])
    placement = Placement(expert_of_slot=slots, num_ep_ranks=num_ranks)
    copies = fan_out(routed, starts, placement)
    assert (copies == fan_out_reference(routed, starts, placement)).all()


def test_a_token_is_sent_once_to_each_rank():
    routed = np.array([[[0, 1]], [[0, 3]]])
    copies = fan_out(routed, np.array([0, 2]), Placement.identity(1, 4, 2))
    assert copies.tolist() == [[[2, 1]]]


def test_ids_outside_the_experts_are_refused():
    with pytest.raises(ValueError, match=r"ids 0\.\.4 lie outside the 4 experts"):
        fan_out(np.array([[[0, 4]]]), np.array([0, 1]), Placement.identity(1, 4, 2))


def test_traffic_of_one_row_by_hand():
    copies = np.array([[[5, 3]], [[2, 4]]])
    rows = Rows(cell=np.array([0, 1]), num_rows=1, num_dp_slots=2)
    result = traffic(copies, rows, Topology.uniform(dp=2, ep=2, capacity=10))
    assert (result.remote, result.peak) == (5.0, 3.0)
    assert result.rho == pytest.approx(6 / 5)
    assert result.efficiency == pytest.approx(5 / 6)


def test_slots_share_the_ranks_of_their_shard():
    assert slot_share(2, 4).tolist() == [[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]]
    assert slot_share(4, 2).tolist() == [[1, 0], [1, 0], [0, 1], [0, 1]]


TOPOLOGY = Topology.uniform(dp=4, ep=4, capacity=200)
WINDOW = window_of(np.random.default_rng(0).integers(10, 100, 80), num_experts=16)
IDENTITY = Placement.identity(3, 16, 4)


def searched(copies=None, **options):
    chosen = PlannerOptions(
        rows="paper", budget_seconds=None, budget_proposals=20_000, num_threads=1, **options
    )
    return schedule(WINDOW, TOPOLOGY, COST, IDENTITY, "reschedule", chosen, copies).report


def test_memory_guard_lowers_the_peak_and_reports_what_is_left():
    free = searched()
    assert free["rank_tokens_above_limit"] == 0
    limit = int(free["rank_tokens_max"] * 0.93)
    guarded = searched(max_rank_tokens=limit)
    assert guarded["rank_tokens_max"] < free["rank_tokens_max"]
    hopeless = searched(max_rank_tokens=1)
    assert hopeless["rank_tokens_above_limit"] > 0


def test_communication_term_trades_cost_for_fewer_copies_at_the_peak():
    rng = np.random.default_rng(1)
    copies = rng.permutation(rank_demand(WINDOW.demand, IDENTITY), axis=0)
    plain, weighed = searched(copies), searched(copies, copy_weight=20.0)
    assert weighed["copy_peak"] < plain["copy_peak"]
    assert weighed["joint_cost"] > plain["joint_cost"]
    assert plain["copy_remote"] == pytest.approx(weighed["copy_remote"], rel=0.05)
