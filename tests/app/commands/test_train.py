"""The embedded training loop on real ranks: fallbacks, wandb files, results on disk."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from app_ranks.faulty_planner import faulty_schedule
from tiny import tiny_config
from wandb_records import offline_runs

from app.commands.train import train
from rollout_hooks.admission import PlannerCalls

pytestmark = pytest.mark.ranks


def test_three_planner_faults_are_three_fallbacks_and_training_goes_on(in_tmp):
    config = tiny_config()
    config = replace(
        config,
        train=replace(config.train, num_windows=4),
        planner=replace(config.planner, deadline_seconds=8.0),
    )
    calls = PlannerCalls(schedule=faulty_schedule)
    figures = train(config, "full", in_tmp / "out", str(in_tmp / "t.json"), calls=calls)
    assert figures["train.fallback"] == 3
    windows = json.loads((in_tmp / "t.json").read_text())["details"]["windows"]
    assert [m["fallback"] for m in windows] == [1, 2, 3, 3]
    assert windows[0]["place/moved_experts"] > 0, "placement and commit go on under a fallback"
    assert figures["train.max_log_prob_difference"] <= 1e-4
    assert figures["train.equal_rows"] >= 0.999
    lines = (in_tmp / "out" / "metrics-full.jsonl").read_text().splitlines()
    assert [json.loads(line)["rollout/step"] for line in lines] == [0, 1, 2, 3]
    assert (in_tmp / "out" / "rank-load-full.png").stat().st_size > 1000

    # Case 14: one writer although two ranks ran, and every logged dict carries its step key.
    runs = offline_runs(in_tmp / "out")
    assert len(runs) == 1
    run = runs[0]
    assert run.group == "local" and run.job_type == "full"
    assert run.step_metric_of["routepack/*"] == "rollout/step"
    rows = [row for row in run.history if "routepack/tps" in row]
    assert [row["rollout/step"] for row in rows] == [0, 1, 2, 3]
    assert [row["routepack/fallback"] for row in rows] == [1, 2, 3, 3]
    assert all("rollout/step" in row for row in run.history)


def test_missing_capture_trains_on_estimated_demand_and_counts_it(in_tmp):
    config = tiny_config()
    config = replace(
        config,
        train=replace(config.train, num_windows=2),
        rollout=replace(config.rollout, missing_capture="estimate", capture=False),
    )
    figures = train(config, "full", in_tmp / "out", str(in_tmp / "t.json"))
    windows = json.loads((in_tmp / "t.json").read_text())["details"]["windows"]
    assert [m["capture/missing"] for m in windows] == [16, 16]
    assert [m["plan/capture_coverage"] for m in windows] == [0, 0]
    assert figures["train.fallback"] == 0
