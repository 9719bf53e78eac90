"""Other parallel shapes of a real slime job: pipeline, virtual pipeline, tensor, context, EP."""

from __future__ import annotations

import numpy as np
import pytest
from tests_of_slime import largest_gradient_difference, load_all

from train_hooks.checkpoint import load_layout

pytestmark = pytest.mark.slime
EXACT = (
    "--custom-megatron-before-train-step-hook-path",
    "slime_on_cpu.dump_gradients.before_train_step",
    "--clip-grad",
    "0",
    "--save-hf",
    "OUTPUT/hf_{rollout_id}",
    "--save",
    "OUTPUT/save",
    "--save-interval",
    "1",
)
SHAPES = {
    "pp2_vpp2_dp2_ep2": "--pipeline-model-parallel-size 2 "
    "--num-layers-per-virtual-pipeline-stage 1",
    "pp2_dp2_ep2_async_save": "--pipeline-model-parallel-size 2 --async-save",
    "tp2_sp_cp2_dp1_ep2": "--tensor-model-parallel-size 2 --sequence-parallel "
    "--context-parallel-size 2 --cp-comm-type all_gather --expert-tensor-parallel-size 1 "
    "--max-tokens-per-gpu 64",
}


@pytest.mark.parametrize("shape", SHAPES)
def test_full_trains_what_plain_slime_trains(run_slime, inputs, shape):
    """Two optimizer steps a rollout, two rollouts, four ranks, fp32.

    With the asynchronous save, plans move experts of the first pipeline stage only; the end of a
    save is a collective of both.
    """
    deep = inputs / "deep"
    where = ("--num-layers", "4", "--hf-checkpoint", f"{deep}/hf", "--load", f"{deep}/hf")
    where = (*where, "--ref-load", f"{deep}/hf")
    one_stage = "async_save" in shape
    rollouts = deep / "one_stage" if one_stage else deep
    where = (*where, "--load-debug-rollout-data", f"{rollouts}/rollout_{{rollout_id}}.pt")
    flags = (*EXACT, *where, *SHAPES[shape].split())
    more = dict(num_gpus=4, timeout=1200, ROUTEPACK_TEST_FP32="1")
    plain = run_slime("train", *flags, **more)
    full = run_slime("app.slime_train", "--routepack-policy", "full", *flags, **more)
    assert len(full.steps) == len(plain.steps) == 4
    assert sum(entry["place/moved_experts"] for entry in full.routepack) > 0
    assert all(entry["fallback"] == 0 for entry in full.routepack)
    assert all(entry["plan/rows"] > 2 for entry in full.routepack)  # of two steps
    if one_stage:
        assert _layers_that_moved(full.folder / "save") == [0, 1]
    worst, name = largest_gradient_difference(plain.folder, full.folder)
    print(f"{shape}: grad_max_rel_diff {worst:.2e} at {name}")
    assert worst <= 1e-5
    for a, b in zip(plain.steps, full.steps, strict=True):
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
    a, b = load_all(plain.folder / "hf_1"), load_all(full.folder / "hf_1")
    assert a.keys() == b.keys()
    different = sum(((a[n] - b[n]).abs() > 1e-4).sum().item() for n in a)
    assert different <= 2e-3 * sum(t.numel() for t in a.values())


def _layers_that_moved(save) -> list[int]:
    """Layers whose experts stand elsewhere than at the start, by the layout beside the save."""
    expert_of_slot = load_layout(save).expert_of_slot
    start = np.arange(expert_of_slot.shape[1])
    return np.flatnonzero((expert_of_slot != start).any(1)).tolist()
