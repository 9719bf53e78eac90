"""Several optimizer steps a rollout: windows of their own, one loss sum each, clipping, KL."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from app_ranks.optimizer_steps import POLICIES, policies_agree
from tiny import tiny_config

from app.commands.train import train
from app.config import ConfigError, RolloutConfig, WarmupConfig, load_config
from app.local.ranks import run_ranks
from app.local.warmup import ensure_warm

STEPS = {"num_steps_per_rollout": 4}
VARIANTS: dict = {
    "per token": (STEPS, {}),
    "per trajectory": ({**STEPS, "calculate_per_token_loss": False}, {}),
    "per token, small cells": ({"num_steps_per_rollout": 3}, {"capacity": 40}),
    "per trajectory, small cells": (
        {"num_steps_per_rollout": 3, "calculate_per_token_loss": False},
        {"capacity": 40},
    ),
    "padded": ({**STEPS, "data_pad_size_multiplier": 16}, {}),
    "kl": ({**STEPS, "use_kl_loss": True, "kl_loss_coef": 0.5, "lr": 2e-3}, {}),
    "dropped": ({"num_steps_per_rollout": 2}, {"capacity": 4}),
}


@pytest.fixture(scope="module")
def agreed(tmp_path_factory):
    """Six groups of three over four optimizer steps: 6, 6, 3 and 3 trajectories; two ranks."""
    rollout = RolloutConfig(num_groups=6, group_size=3, max_new_tokens=24)
    warmup = WarmupConfig(num_steps=25, batch_size=8, lr=5e-3)  # until some answers end early
    config = tiny_config(rollout=rollout, warmup=warmup)
    patch = pytest.MonkeyPatch()
    with patch.context() as context:
        context.chdir(tmp_path_factory.mktemp("steps"))
        weights = ensure_warm(config)
        return run_ranks(policies_agree, config, str(weights), VARIANTS)


@pytest.mark.ranks
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_do_not_depend_on_the_schedule(agreed, variant):
    found = agreed[variant]
    assert found["worst"] <= 1e-5
    assert found["moved"]["full"] > 0 and found["moved"]["off"] == 0


@pytest.mark.ranks
def test_the_schedules_compared_differ(agreed):
    cells = agreed["per token"]["cells"]
    assert cells["off"] != cells["base"] != cells["full"] != cells["off"]


@pytest.mark.ranks
@pytest.mark.parametrize("loss", ["per token", "per trajectory"])
def test_the_number_of_micro_batches_does_not_matter(agreed, loss):
    few, many = agreed[loss], agreed[f"{loss}, small cells"]
    assert many["first_rows"] > few["first_rows"], "the first steps train the same trajectories"
    difference = (few["gradient"] - many["gradient"]).norm()
    assert difference <= 1e-4 * few["gradient"].norm()


@pytest.mark.ranks
def test_the_two_normalisations_are_two_losses(agreed):
    token, trajectory = (agreed[v]["gradient"] for v in ("per token", "per trajectory"))
    assert (token - trajectory).norm() > 1e-3 * token.norm()


@pytest.mark.ranks
def test_the_last_windows_are_short(agreed):
    assert agreed["per token"]["positions"]["full"] == [6, 6, 3, 3]
    assert all(len(rows) == 4 for rows in agreed["per token"]["rows"].values())


@pytest.mark.ranks
def test_whole_trailing_groups_are_dropped_where_a_cell_would_be_empty(agreed):
    # every trajectory needs a cell of its own: 9 on 2 slots leave one empty, 6 do not
    for policy in POLICIES:
        assert agreed["dropped"]["dropped"][policy] == [3, 3]
        assert agreed["dropped"]["rows"][policy] == [3, 3]


@pytest.mark.ranks
def test_cells_are_padded_to_the_multiple_and_stay_below_the_capacity(agreed):
    padded = np.array(agreed["padded"]["padded"])
    assert (padded % 16 == 0).all() and padded.max() <= 96
    assert (np.array(agreed["per token"]["padded"]) % 16 != 0).any()


@pytest.mark.ranks
def test_the_reference_is_the_start_and_its_penalty_grows_from_there(agreed):
    assert agreed["kl"]["reference_error"] <= 1e-4
    assert min(agreed["kl"]["kl"]) > 1e-6
    assert agreed["per token"]["kl"] == [0, 0, 0, 0]


@pytest.mark.ranks
def test_clipping_fires_from_the_second_step_on(in_tmp):
    config = tiny_config()
    config = replace(
        config,
        train=replace(
            config.train,
            num_windows=2,
            num_steps_per_rollout=2,
            lr=5e-3,
            use_kl_loss=True,
            kl_loss_coef=0.01,
        ),
    )
    figures = train(config, "full", in_tmp / "out", str(in_tmp / "t.json"))
    details = json.loads((in_tmp / "t.json").read_text())["details"]
    for first, second in details["steps"]:
        assert first["clip_fraction"] == 0 < second["clip_fraction"]
    windows = details["windows"]
    assert [m["clip_fraction_last"] for m in windows] == [
        s[1]["clip_fraction"] for s in details["steps"]
    ]
    assert details["steps"][0][0]["kl"] < 1e-8 < windows[1]["kl"]
    assert figures["train.kl"] == windows[1]["kl"]
    assert all(
        m["plan/rows"] == sum(s["rows"] for s in steps)
        for m, steps in zip(windows, details["steps"])
    )


@pytest.mark.parametrize(
    "train_section, words",
    [
        (
            "{num_steps_per_rollout: 9}",
            ["num_steps_per_rollout 9", "0 trajectories", "ranks.world 2"],
        ),
        ("{kl_loss_coef: 0.1}", ["kl_loss_coef 0.1", "use_kl_loss: true"]),
        ("{data_pad_size_multiplier: 1024}", ["1024", "planner.capacity 512"]),
    ],
)
def test_impossible_steps_are_refused_by_name(tmp_path, train_section, words):
    (tmp_path / "run.yaml").write_text(f"train: {train_section}")
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path / "run.yaml")
    for word in words:
        assert word in str(error.value)
