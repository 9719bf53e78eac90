"""`routepack train --online`: policies that learn, compared by their reward curves."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import yaml
from pydantic import TypeAdapter
from tiny import tiny_config
from wandb_records import offline_runs

from app.cli import main
from app.commands.train_online import gains, online_config
from app.config import OnlineConfig, RunConfig
from app.results.statistics import paired_curves


@pytest.mark.ranks
def test_policies_learn_in_runs_of_their_own(in_tmp):
    config = tiny_config()
    online = OnlineConfig(
        num_windows=2,
        num_edge_windows=1,
        rollout=config.rollout,
        tasks=config.tasks,
        train=replace(config.train, num_steps_per_rollout=2, lr=5e-3),
        warmup=config.warmup,
    )
    content = TypeAdapter(RunConfig).dump_python(replace(config, online=online), mode="json")
    (in_tmp / "run.yaml").write_text(yaml.safe_dump(content))
    command = ["train", "--online", "--config", "run.yaml", "--policies", "full", "--seeds", "2"]
    command += ["--output", "out", "--json", "o.json", "--report", "o.html"]
    assert main(command) == 0
    content = json.loads((in_tmp / "o.json").read_text())
    figures, details = content["figures"], content["details"]
    for policy in ("off", "full"):
        curves = np.array([details["curves"][policy][seed] for seed in ("42", "43")])
        assert curves.shape == (2, 2)
        assert figures[f"online.reward_gain.{policy}"] == pytest.approx(gains(curves, 1).mean())
        assert figures[f"online.reward_gain_min.{policy}"] == pytest.approx(gains(curves, 1).min())
        assert [len(steps) for steps in details["steps"][policy]["43"]] == [2, 2]
    assert details["curves"]["off"]["42"] != details["curves"]["off"]["43"]
    # the same start and the same prompts: the first rewards are the same under every policy
    for seed in ("42", "43"):
        assert details["curves"]["off"][seed][0] == details["curves"]["full"][seed][0]
    assert (
        figures["online.reward_difference.full.ci_low"]
        <= figures["online.reward_difference.full.ci_high"]
    )
    runs = [run for seed in (42, 43) for run in offline_runs(in_tmp / "out" / f"seed-{seed}")]
    assert sorted(run.job_type for run in runs) == ["full", "full", "off", "off"]
    assert {run.group for run in runs} == {"local-online"}
    assert all(sum("routepack/reward" in row for row in run.history) == 2 for run in runs)
    page = (in_tmp / "o.html").read_text()
    assert "Reward curves" in page and "full, seed 43" in page


def test_the_online_section_replaces_the_runs_own():
    config = online_config(RunConfig(), num_windows=8, num_seeds=2)
    assert config.train.num_windows == 8 and config.train.num_steps_per_rollout == 2
    assert config.tasks == config.online.tasks and config.warmup == config.online.warmup
    assert config.online.num_edge_windows == 4 and config.online.num_seeds == 2
    with pytest.raises(ValueError, match="got 1, --online compares two ends"):
        online_config(RunConfig(), num_windows=1)
    with pytest.raises(ValueError, match=r"num_edge_windows 40.*num_windows 60"):
        OnlineConfig(num_edge_windows=40)


def test_a_difference_of_curves_is_proven_only_where_every_seed_shows_it():
    rng = np.random.default_rng(0)
    noise = 0.05 * rng.standard_normal((3, 60))
    alike = paired_curves(noise, 10)
    assert alike.holds_zero and alike.low < alike.mean < alike.high
    shifted = paired_curves(noise + 0.1, 10)
    assert not shifted.holds_zero and shifted.mean == pytest.approx(0.1 + alike.mean)
    one_seed = noise + np.array([[0.3], [0.0], [-0.05]])
    assert paired_curves(one_seed, 10).holds_zero
    with pytest.raises(ValueError, match="5 windows hold no block of 10"):
        paired_curves(noise[:, :5], 10)
