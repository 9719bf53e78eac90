"""Whole slime jobs: rollout function, engine actor and weight updates around a stand-in engine.

Everything but the model inside the engine is slime's: router registration, generation by HTTP,
dynamic sampling, partial rollouts, and each way to update weights. What the engine holds at the
end must be what slime saves.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from tests_of_slime import largest_gradient_difference, load_all

pytestmark = pytest.mark.slime
FULL = ("--routepack-policy", "full")
SAVE = ("--save", "OUTPUT/save", "--save-interval", "1", "--save-hf", "OUTPUT/hf_{rollout_id}")
DUMP = (
    "--custom-megatron-before-train-step-hook-path",
    "slime_on_cpu.dump_gradients.before_train_step",
    "--clip-grad",
    "0",
)
DISK = ("--update-weight-transport", "disk", "--update-weight-disk-dir", "OUTPUT/weights")
DELTA = (*DISK, "--update-weight-mode", "delta")
DELTA = (*DELTA, "--update-weight-local-checkpoint-dir", "OUTPUT/local")
COLOCATED = ("--colocate", "--sglang-ep-size", "2")
PARTIAL = (
    "--partial-rollout",
    "--over-sampling-batch-size",
    "6",
    "--dynamic-sampling-filter-path",
    "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
)


def last_weights(run) -> dict[str, torch.Tensor]:
    """What the engine holds at the end of a job."""
    versions = [int(p.stem.split("-")[1]) for p in run.folder.glob("engine-*.safetensors")]
    return load_file(run.folder / f"engine-{max(versions)}.safetensors")


def assert_engine_holds_what_was_saved(run) -> None:
    saved, held = load_all(run.folder / "hf_1"), last_weights(run)
    assert saved.keys() == held.keys()
    different = [name for name in saved if not torch.equal(saved[name], held[name])]
    assert not different, different


@pytest.mark.parametrize("way", ["broadcast", "disk", "delta", "release_train"])
def test_a_moved_layout_reaches_the_engine_in_logical_order(run_slime, way):
    flags = {
        "broadcast": (),
        "disk": DISK,
        "delta": DELTA,
        "release_train": (*DISK, "--release-train"),
    }[way]
    # In bf16, as slime runs: its delta compares bytes with those of the bf16 checkpoint.
    run = run_slime("app.slime_train", *FULL, *SAVE, *flags, num_engine_gpus=1)
    assert [entry["fallback"] for entry in run.routepack] == [0, 0]
    assert sum(entry["place/moved_experts"] for entry in run.routepack) > 0
    assert_engine_holds_what_was_saved(run)


def test_actors_made_anew_for_three_rollouts_train_as_in_plain_slime(run_slime):
    """--release-train: each rollout's first commit comes after a load and before the first step."""
    flags = (*SAVE, *DUMP, *DISK, "--release-train", "--num-rollout", "3")
    plain, full = (
        run_slime(module, *more, *flags, num_engine_gpus=1, ROUTEPACK_TEST_FP32="1")
        for module, more in (("train", ()), ("app.slime_train", FULL))
    )
    assert len(full.routepack) == 3
    assert all(entry["fallback"] == 0 for entry in full.routepack)
    assert sum(entry["place/moved_experts"] for entry in full.routepack[1:]) > 0
    assert len(plain.steps) == len(full.steps) >= 3
    for a, b in zip(plain.steps, full.steps, strict=True):
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
    a, b = load_all(plain.folder / "hf_2"), load_all(full.folder / "hf_2")
    assert all((a[name] - b[name]).abs().max() <= 1e-5 for name in a)


def test_colocated_and_offloaded_experts_reach_their_engine_rank(run_slime):
    run = run_slime(
        "app.slime_train",
        *FULL,
        *SAVE,
        *COLOCATED,
        num_engine_gpus=2,
        colocate=True,
        ROUTEPACK_TEST_FP32="1",
    )
    assert sum(entry["place/moved_experts"] for entry in run.routepack) > 0
    assert_engine_holds_what_was_saved(run)


def test_partial_rollouts_and_dynamic_sampling_train_as_in_plain_slime(run_slime, inputs):
    """Rollout 1 goes on with four samples that rollout 0 gave up; plain slime trains its dump."""
    record = ("--save-debug-rollout-data", "OUTPUT/rollout_{rollout_id}.pt")
    record = (*record, "--prompt-data", f"{inputs}/hard.jsonl")
    run = run_slime(
        "app.slime_train",
        *FULL,
        *DUMP,
        *SAVE,
        *PARTIAL,
        *record,
        num_engine_gpus=1,
        ROUTEPACK_TEST_FP32="1",
    )
    first, second = run.routepack
    assert (first["capture/stale"], first["capture/mixed"]) == (0, 0)
    assert (second["capture/stale"], second["capture/mixed"]) == (4, 4)
    assert [entry["capture/filler_rows"] for entry in run.routepack] == [16, 16]
    assert [entry["capture/missing"] for entry in run.routepack] == [0, 0]
    assert sum(entry["place/moved_experts"] for entry in run.routepack) > 0
    dumps = ("--load-debug-rollout-data", f"{run.folder}/rollout_{{rollout_id}}.pt")
    plain = run_slime("train", *DUMP, *SAVE, *dumps, ROUTEPACK_TEST_FP32="1")
    worst, name = largest_gradient_difference(plain.folder, run.folder)
    print(f"grad_max_rel_diff {worst:.2e} at {name}")
    assert worst <= 1e-5
    for a, b in zip(plain.steps, run.steps, strict=True):
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
