"""Placement and rows of sealed rollouts: chains, fallbacks, estimates."""

from __future__ import annotations

import numpy as np
import pytest
from slime_cases import TOPOLOGY, job, rollout_planner, sealed

from app.slime.cost import bytes_per_expert, cost_of_model
from rollout_hooks.admission import PlannerCalls
from rollout_hooks.slime_windows import windows_of


def test_one_placement_a_rollout_and_rows_of_its_own_for_every_step():
    planner = rollout_planner()
    opened = planner.place(sealed(), TOPOLOGY)
    joined = planner.join(0)
    assert len(joined.plans) == 2
    assert all(plan.placement is joined.plans[0].placement for plan in joined.plans)
    assert opened.placement.version == 1 and joined.fallback is None
    assert {plan.window_id for plan in joined.plans} == {0, 1}
    report = planner.report(0)
    assert report.figures["place/planned_moves"] > 0
    assert report.figures["plan/saving_over_slime"] > 0
    assert report.loads[1].max() < report.loads[0].max()


def test_plans_chain_from_the_last_emitted_placement_without_waiting_for_training():
    planner = rollout_planner()
    first = planner.place(sealed(0), TOPOLOGY)
    second = planner.place(sealed(1, seed=9), TOPOLOGY)  # asynchronous: before join(0)
    assert second.carried is first.placement
    assert planner.join(0).plans[0].layout_version == 0
    assert planner.join(1).plans[0].layout_version == first.placement.version


@pytest.mark.parametrize("policy", ["observe", "base", "reschedule"])
def test_policies_without_moves_never_emit_another_placement(policy):
    planner = rollout_planner(policy)
    opened = planner.place(sealed(), TOPOLOGY)
    assert opened.placement.version == 0
    planned = planner.join(0).plans[0].placement.version
    assert planned == (1 if policy == "observe" else 0)


def test_without_any_capture_the_next_rollout_is_planned_on_what_was_executed():
    planner = rollout_planner()
    planner.place(sealed(0, unknown=range(16)), TOPOLOGY)
    executed = np.tile(np.array([60, 50, 40, 30, 5, 5, 5, 5]), (2, 1))
    figures = planner.report(0, executed).figures
    # planned on uniform demand, so nothing moved and ranks got 180 against 20 tokens
    assert figures["capture/executed_excess"] == pytest.approx(0.8)
    assert 0.7 < figures["capture/regret"] <= 0.8
    assert planner.place(sealed(1, unknown=range(16)), TOPOLOGY).placement.version == 1
    again = planner.report(1, executed).figures
    assert again["capture/regret"] < 0.1


def test_nothing_moves_while_only_the_critic_trains():
    planner = rollout_planner()
    opened = planner.place(sealed(), TOPOLOGY, may_move=False)
    assert opened.policy == "reschedule" and opened.placement.version == 0
    assert planner.place(sealed(1), TOPOLOGY).placement.version == 1


def test_a_planner_that_raises_falls_back_on_all_steps():
    def broken(*args):
        raise RuntimeError("injected")

    planner = rollout_planner(calls=PlannerCalls(place=broken))
    opened = planner.place(sealed(), TOPOLOGY)
    joined = planner.join(0)
    assert "injected" in joined.fallback
    assert opened.placement.version == 0 and len(joined.rows) == 2


def test_unknown_demand_is_estimated_from_earlier_rollouts():
    planner = rollout_planner()
    planner.place(sealed(0), TOPOLOGY)
    planner.join(0)
    planner.place(sealed(1, unknown=range(16)), TOPOLOGY)
    assert planner.report(1).figures["plan/capture_coverage"] == 0.0
    whole, steps, positions = windows_of(sealed(2, unknown=[3]), planner.shares)
    assert whole.estimated.sum() == 1 and len(steps) == len(positions) == 2
    assert whole.demand[3].sum() == 2 * 2 * (whole.length[3] - 1)


def test_cost_shrinks_with_the_ranks_that_share_a_slot():
    one = cost_of_model(job(), 128)
    four = cost_of_model(job(tensor_model_parallel_size=2, context_parallel_size=2), 128)
    assert four.alpha == pytest.approx(one.alpha / 4)
    assert bytes_per_expert(job()) == 3 * 64 * 32 * (2 + 2 + 4 + 8)
