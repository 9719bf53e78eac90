"""What rollouts may be in a real slime job: siblings of a fan-out, a critic beside the actor."""

from __future__ import annotations

import json

import pytest
from tests_of_slime import largest_gradient_difference, load_all

pytestmark = pytest.mark.slime
FULL = ("--routepack-policy", "full")
EXACT = (
    "--custom-megatron-before-train-step-hook-path",
    "slime_on_cpu.dump_gradients.before_train_step",
    "--clip-grad",
    "0",
)


def test_siblings_of_a_fan_out_stay_in_one_step(run_slime, inputs):
    """25 samples of 16 rollouts, 8 rollouts a step: rows change, the loss of a step does not."""
    flags = (*EXACT, "--load-debug-rollout-data", f"{inputs}/fan/rollout_{{rollout_id}}.pt")
    plain = run_slime("train", *flags, ROUTEPACK_TEST_FP32="1")
    full = run_slime("app.slime_train", *FULL, *flags, ROUTEPACK_TEST_FP32="1")
    assert sum(entry["place/moved_experts"] for entry in full.routepack) > 0
    assert [entry["capture/filler_rows"] for entry in full.routepack] == [25, 25]
    worst, name = largest_gradient_difference(plain.folder, full.folder)
    print(f"grad_max_rel_diff {worst:.2e} at {name}")
    assert worst <= 1e-5
    for a, b in zip(plain.steps, full.steps, strict=True):
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)


def test_a_critic_is_left_alone(run_slime, tmp_path):
    """Rollout 0 trains the critic only: nothing may move then, since no actor would commit.

    The critic starts from a Megatron checkpoint: at this commit slime's own HF loader knows no
    `output_layer.bias`, which a critic has.
    """
    start = run_slime(
        "train", "--num-rollout", "1", "--save", "OUTPUT/save", "--save-interval", "1"
    )
    overrides = dict(
        load=str(start.folder / "save"),
        save=str(tmp_path / "critic"),
        finetune=True,
        no_load_optim=True,
        no_load_rng=True,
        dist_ckpt_strictness="log_all",
    )
    roles = [{"name": "default", "role": "critic", "overrides": overrides}]
    (tmp_path / "roles.yaml").write_text(json.dumps({"megatron": roles}))
    flags = ("--clip-grad", "0", "--advantage-estimator", "ppo", "--num-critic-only-steps", "1")
    flags = (*flags, "--megatron-config-path", str(tmp_path / "roles.yaml"))
    flags = (*flags, "--start-rollout-id", "0", "--num-rollout", "3")
    flags = (*flags, "--save", "OUTPUT/save", "--save-interval", "1")
    flags = (*flags, "--save-hf", "OUTPUT/hf_{rollout_id}")
    plain = run_slime("train", *flags, ROUTEPACK_TEST_FP32="1", timeout=900)
    full = run_slime("app.slime_train", *FULL, *flags, ROUTEPACK_TEST_FP32="1", timeout=900)
    assert len(full.routepack) == 2  # rollouts 1 and 2
    assert sum(entry["place/moved_experts"] for entry in full.routepack) > 0
    norms = [
        [(name, step[name]) for step in run.steps for name in step if "grad_norm" in name]
        for run in (plain, full)
    ]
    assert len(norms[0]) == 10  # six steps of the critic, four of the actor
    for (name, expected), (same, got) in zip(*norms, strict=True):
        assert same == name and got == pytest.approx(expected, rel=1e-3)
    a, b = load_all(plain.folder / "hf_2"), load_all(full.folder / "hf_2")
    assert a.keys() == b.keys()
    different = sum(((a[n] - b[n]).abs() > 1e-4).sum().item() for n in a)
    assert different <= 2e-3 * sum(t.numel() for t in a.values())
