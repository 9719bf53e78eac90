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
    different = [n for n in before if not torch.equal(before[n].float(), after[n].float())]
    assert not different
    assert len(run.steps) == 4 and all(step["grad_norm"] > 0 for step in run.steps)


def test_the_command_prints_one_argument_a_line():
    done = subprocess.run(
        [sys.executable, "-m", "app.models.bailing_args", "ling-flash-2.0"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.search(r"^--num-layers\n32$", done.stdout, re.M)
