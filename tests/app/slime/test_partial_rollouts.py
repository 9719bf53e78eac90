"""Partial rollouts, weight versions and resumed jobs in the adaptors' logic, without slime."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from slime_cases import TOPOLOGY, job, rollout_planner, sample, sealed

from app.slime.config import SlimeConfig
from app.slime.manager import manager_class
from planner import warm_up
from planner.placement import Placement
from planner.policies import POLICIES
from planner.policy import make_plan
from rollout_hooks.slime_capture import capture, demand_of_samples, weight_versions

ABORTED, COMPLETED = SimpleNamespace(value="aborted"), SimpleNamespace(value="completed")


def continued(part, num_tokens: int) -> None:
    """What slime does to a partial sample whose engine returns the routing of every row again."""
    part.tokens = list(range(num_tokens))
    part.rollout_routed_experts = np.tile(np.array([2, 3], np.int32), (num_tokens - 1, 3, 1))
    part.status = COMPLETED


def test_an_aborted_sample_waits_for_its_other_part():
    part = sample(num_tokens=5, status=ABORTED)
    part.rollout_routed_experts = part.rollout_routed_experts[:2]  # the engine stopped early
    capture(job(), part)
    assert part.rollout_routed_experts.dtype == np.int32
    assert not hasattr(part, "routepack_counts")


def test_demand_of_a_continued_sample_is_that_of_all_its_rows():
    part = sample(num_tokens=5, status=COMPLETED)
    capture(job(), part)
    continued(part, 9)
    capture(job(), part)
    assert part.routepack_counts.tolist() == [[0, 0, 8, 8, 0, 0, 0, 0]] * 2
    assert part.rollout_routed_experts.dtype == np.uint8


def test_a_sample_sealed_without_its_hook_is_counted_at_sealing():
    part = sample(num_tokens=5, status=ABORTED)
    demands, _ = demand_of_samples(job(), [part], "error")
    assert demands[0].sum() == 4 * 2 * 2


def test_a_refused_capture_leaves_no_older_demand_behind():
    part = sample(num_tokens=5, status=COMPLETED)
    capture(job(), part)
    continued(part, 9)
    part.rollout_routed_experts = part.rollout_routed_experts[:3]
    demands, _ = demand_of_samples(job(use_rollout_routing_replay=False), [part], "estimate")
    assert demands == [None]


def test_stale_and_mixed_versions_are_told_apart():
    versions = [["2"], ["1"], ["1", "2"], ["2", "2"], [], ["default"]]
    samples = [SimpleNamespace(weight_versions=v) for v in versions]
    assert weight_versions(samples) == (3, 1)  # stale: 1, 1 then 2, and one never updated
    assert weight_versions([SimpleNamespace()]) == (0, 0)


def test_fillers_and_versions_are_reported_beside_the_plan():
    rollout = replace(sealed(), num_stale=3, num_mixed=2)
    planner = rollout_planner()
    planner.place(rollout, TOPOLOGY)
    planner.join(0)
    figures = planner.report(0).figures
    assert figures["capture/filler_rows"] == len(rollout.lengths)  # the last position of each
    assert figures["capture/stale"] == 3 and figures["capture/mixed"] == 2


def test_a_placement_of_another_ep_size_does_not_stop_planning():
    """A job that resumes at EP 2 from a checkpoint of EP 4."""
    planner = rollout_planner()
    planner.carried = Placement.identity(2, 8, 4)
    opened = planner.place(sealed(), TOPOLOGY)
    assert opened.placement.num_ep_ranks == 2
    assert opened.placement.num_moved(Placement.identity(2, 8, 2)) > 0


@pytest.mark.parametrize("pp", [1, 4])
def test_the_planner_is_compiled_for_the_pipeline_of_the_job(pp, monkeypatch):
    planned = []

    def recording(window, topology, cost, carried, policy, options):
        plan = make_plan(window, topology, cost, carried, policy, options)
        planned.append((policy, topology.pp, plan.rows.num_rows > 0))

    monkeypatch.setattr(warm_up, "make_plan", recording)
    planner = rollout_planner()
    warm_up.compile_planner(planner.cost, planner.options, pp=pp)
    assert planned == [(policy, pp, True) for policy in POLICIES]


def test_a_critic_does_not_take_the_topology_away():
    """slime's critic reports its own sizes to the same manager, after the actor."""

    class Manager:
        def set_train_parallel_config(self, config):
            self.train_parallel_config = config

    manager = object.__new__(manager_class(Manager, SlimeConfig()))
    manager.set_train_parallel_config({"dp_size": 2, "routepack": {"topology": TOPOLOGY}})
    manager.set_train_parallel_config({"dp_size": 4})
    assert manager.train_parallel_config["dp_size"] == 4
    assert manager.train_parallel_config["routepack"]["topology"] is TOPOLOGY
