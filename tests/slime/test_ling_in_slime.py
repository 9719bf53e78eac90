"""A tiny Ling 2.0 through slime: Hugging Face -> Megatron -> training -> Hugging Face."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from tests_of_slime import load_all

pytestmark = pytest.mark.slime


def test_ling_loads_trains_moves_and_exports(run_slime, inputs, tmp_path):
    """At learning rate 0 the export after a full-policy rollout is the checkpoint, bit for bit.

    The dumps hold the routing of another model, so replay is off and demand is estimated.
    """
    from slime_on_cpu.ling import arguments, make_checkpoint

    ling = tmp_path / "ling"
    make_checkpoint(ling)
    run = run_slime(
        "app.slime_train",
        "--routepack-policy",
        "full",
        "--lr",
        "0",
        "--save",
        "OUTPUT/save",
        "--save-interval",
        "1",
        "--save-hf",
        "OUTPUT/hf_{rollout_id}",
        config="planner: {stop: cv, budget_seconds: 0.2, num_cores: 1}\n"
        "capture: {missing: estimate}\n",
        arguments=arguments(inputs, ling),
    )
    before, after = load_all(ling), load_all(run.folder / "hf_1")
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        if name.endswith("expert_bias"):  # Megatron holds it in bf16 while weights are loaded
            torch.testing.assert_close(after[name], tensor.bfloat16().float())
        else:
            assert torch.equal(after[name].float(), tensor.float()), name
    assert [entry["policy"] for entry in run.routepack] == ["reschedule", "full"]
    # Nothing is known about rollout 0; rollout 1 is planned on what the routers did in it.
    assert run.routepack[0]["place/moved_experts"] == 0
    assert run.routepack[1]["place/moved_experts"] > 0
    assert run.routepack[1]["capture/executed_excess"] >= 0
    assert len(run.steps) == 4 and all(step["grad_norm"] > 0 for step in run.steps)


def test_the_command_prints_one_argument_a_line():
    done = subprocess.run(
        [sys.executable, "-m", "app.models.bailing_args", "ling-flash-2.0"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.search(r"^--num-layers\n32$", done.stdout, re.M)
