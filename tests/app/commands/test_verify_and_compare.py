"""The two proofs a user runs: equal models under every policy, and the paired comparison."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tiny import tiny_config
from wandb_records import offline_runs

from app.commands.compare import compare
from app.commands.verify import verify

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("world, ep", [(2, 2), (4, 2)], ids=["EP 2", "EP 2 x EDP 2"])
def test_verify_proves_equality_and_its_controls_fail(in_tmp, world, ep):
    assert verify(tiny_config(world, ep), str(in_tmp / "v.json"))
    figures = json.loads((in_tmp / "v.json").read_text())["figures"]
    assert figures["verify.grad_max_rel_diff"] <= 1e-5
    assert figures["verify.loss_max_rel_diff"] <= 1e-5
    assert figures["verify.foreign_counts_different"] == 0
    assert figures["verify.moved_state_tensors_different"] == 0
    assert figures["verify.later_state_tensors_different_top2"] == 0
    assert figures["verify.later_state_max_abs_diff"] <= 1e-6
    assert figures["verify.negative_controls"] == figures["verify.negative_controls_failed"] == 4


def test_compare_measures_every_policy_on_the_same_windows(in_tmp):
    policies = ("off", "base", "reroute", "full")
    config = tiny_config()
    config = replace(config, train=replace(config.train, num_steps_per_rollout=2, use_kl_loss=True))
    page = in_tmp / "c.html"
    figures = compare(
        config, policies, in_tmp / "out", str(in_tmp / "c.json"), quick=False, report=str(page)
    )
    content = json.loads((in_tmp / "c.json").read_text())
    assert "Full against off" in page.read_text()
    assert content["figures"] == figures
    names = [
        "tps_full_over_off.median",
        "tps_full_over_base.ci_low",
        "tps_reroute_over_base.ci_high",
        "base_over_base.median",
        "window_seconds_full_over_off.median",
        "expert_max_over_mean.off",
        "expert_max_over_mean.base",
        "expert_max_over_mean.reroute",
        "expert_max_over_mean.full",
        "loss_max_rel_diff",
        "skew_max_over_mean.without",
        "skew_max_over_mean.with",
    ]
    assert {f"compare.{name}" for name in names} <= figures.keys()
    share = "compare.headroom_share.full"
    assert (share in figures) != (share in content["skipped"])
    assert (
        figures["compare.expert_max_over_mean.full"] < figures["compare.expert_max_over_mean.off"]
    )
    assert figures["compare.expert_max_over_mean.base"] == pytest.approx(
        figures["compare.expert_max_over_mean.off"]
    )
    assert figures["compare.loss_max_rel_diff"] <= 1e-5
    measured = {(m["window"], m["policy"]) for m in content["details"]["measurements"]}
    assert len(measured) == 2 * 6, "two windows, four policies, the control and the ideal"
    runs = offline_runs(in_tmp / "out")
    assert sorted(run.job_type for run in runs) == sorted(policies)
    assert {run.group for run in runs} == {"local"}
