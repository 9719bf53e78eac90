"""RoutePack in a real slime job: moves, offload, asynchronous order, resume, EDP, refusals."""

from __future__ import annotations

import json

import pytest
import torch
from tests_of_slime import largest_gradient_difference, load_all

pytestmark = pytest.mark.slime
FULL = ("--routepack-policy", "full")
DUMP = (
    "--custom-megatron-before-train-step-hook-path",
    "slime_on_cpu.dump_gradients.before_train_step",
    "--clip-grad",
    "0",
)


def test_twenty_random_moves_keep_state_copies_exports_and_memory(run_slime):
    flags = ("--custom-megatron-before-train-step-hook-path",)
    run = run_slime("app.slime_train", *FULL, *flags, "slime_on_cpu.move_experts.before_train_step")
    for rank in range(2):
        result = json.loads((run.folder / f"moves-{rank}.json").read_text())
        print(result)
        assert result["moved"] > 200 and result["state_tensors"] > 0
        assert result["state_different"] == 0
        assert result["copies_different"] == {"actor": 0, "ref": 0}
        assert len(set(result["host_bytes"])) == 1
        assert result["stale_infos"] == 0
    before, after = load_all(run.folder / "hf_before"), load_all(run.folder / "hf_after")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_offload_wakes_commits_and_saves_in_logical_order(run_slime):
    more = (*DUMP, "--save", "OUTPUT/save", "--save-interval", "1", "--save-hf")
    more = (*more, "OUTPUT/hf_{rollout_id}")
    resident = run_slime("app.slime_train", *FULL, *more, ROUTEPACK_TEST_FP32="1")
    offloaded = run_slime(
        "app.slime_train", *FULL, *more, "--offload-train", ROUTEPACK_TEST_FP32="1"
    )
    assert sum(entry["place/moved_experts"] for entry in offloaded.routepack) > 0
    assert largest_gradient_difference(resident.folder, offloaded.folder)[0] <= 1e-5
    a, b = load_all(resident.folder / "hf_1"), load_all(offloaded.folder / "hf_1")
    assert all((a[name] - b[name]).abs().max() <= 1e-5 for name in a)
    ranks = [path.read_text().splitlines() for path in offloaded.folder.glob("staging-*.jsonl")]
    sleeps = [[json.loads(line) for line in rank] for rank in ranks]
    assert any(rank[-1]["reserved"] > 0 for rank in sleeps)
    assert all(sleep["held"] == 0 for rank in sleeps for sleep in rank)


def test_plan_n_is_not_behind_generate_n_plus_1(run_slime):
    sleep = 60.0
    run = run_slime(
        "app.slime_train_async",
        *FULL,
        "--custom-reward-post-process-path",
        "slime_on_cpu.slow_rollout.rewards",
        ROUTEPACK_TEST_SLEEP=str(sleep),
    )
    first, second = (json.loads((run.folder / f"generated-{i}.json").read_text()) for i in (0, 1))
    assert second - first >= sleep
    for entry in run.routepack:
        waited = entry["time/place"] + entry["time/batch_await"]
        print(f"plan {entry['time/plan']:.2f} s, waited {waited:.2f} s")
        assert waited <= entry["time/plan"] + 1.0
    assert sum(entry["place/moved_experts"] for entry in run.routepack) > 0


@pytest.mark.parametrize("save", ["at_once", "asynchronous"])
def test_a_save_under_a_moved_layout_resumes_in_plain_slime(run_slime, save):
    """Weights and Adam's moments: rollout 2 trains as in the job that was never interrupted.

    Asynchronous: the move of rollout 1 waits for the end of rollout 0's save.
    """
    flags = (*DUMP, "--save", "OUTPUT/save", "--save-interval", "1")
    flags = (*flags, "--save-hf", "OUTPUT/hf_{rollout_id}")
    flags += ("--async-save",) if save == "asynchronous" else ()
    moved = run_slime("app.slime_train", *FULL, *flags, ROUTEPACK_TEST_FP32="1")
    assert sum(entry["place/moved_experts"] for entry in moved.routepack) > 0
    assert (moved.folder / "save" / "routepack_layout.json").is_file()
    more = ("--num-rollout", "3")
    load = ("--load", str(moved.folder / "save"), "--override-opt-param-scheduler")
    resumed = run_slime("train", *DUMP, *load, *more, ROUTEPACK_TEST_FP32="1")
    whole = run_slime("app.slime_train", *FULL, *DUMP, *more, ROUTEPACK_TEST_FP32="1")
    assert [len(run.steps) for run in (whole, resumed)] == [6, 2]
    for a, b in zip(whole.steps[4:], resumed.steps, strict=True):
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
    if save == "at_once":  # without Adam's moments the second step stands elsewhere
        forgetful = run_slime(
            "train", *DUMP, *load, *more, "--no-load-optim", ROUTEPACK_TEST_FP32="1"
        )
        lost = forgetful.steps[1]["grad_norm"]
        assert lost != pytest.approx(whole.steps[5]["grad_norm"], rel=1e-4)


def test_ep_2_by_edp_2_on_four_ranks(run_slime):
    plain = run_slime("train", *DUMP, num_gpus=4, ROUTEPACK_TEST_FP32="1", timeout=900)
    full = run_slime(
        "app.slime_train", *FULL, *DUMP, num_gpus=4, ROUTEPACK_TEST_FP32="1", timeout=900
    )
    assert sum(entry["place/moved_experts"] for entry in full.routepack) > 0
    assert largest_gradient_difference(plain.folder, full.folder)[0] <= 1e-5
    for a, b in zip(plain.steps, full.steps):
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)


def test_a_renamed_seam_is_refused_by_name_before_anything_starts(run_slime):
    run = run_slime(
        "app.slime_train",
        *FULL,
        check=False,
        ROUTEPACK_TEST_RENAME="slime.utils.dp_schedule.build_dp_schedule",
    )
    assert run.code != 0
    assert "slime seam slime.utils.dp_schedule.build_dp_schedule is not there" in run.log
    assert "--routepack-policy off" in run.log and "Timer train start" not in run.log
