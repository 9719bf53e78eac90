"""`routepack replay`: names and invariants of the studies' figures, on any recorded window."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from replay_cases import JOB, QUICK, read_json

from planner.policies import POLICIES


@pytest.fixture
def replayed(run, source, costs, tmp_path):
    """Figures of `replay --studies ...` on the small source."""

    def call(*more: str) -> dict:
        target = tmp_path / "r.json"
        code, out, err = run(
            "replay", source, *JOB, *QUICK, "--cost", costs, "--json", target, *more
        )
        assert code == 0, err
        return read_json(target) | {"out": out}

    return call


def test_policies_report_the_figures_of_table_6(replayed):
    found = replayed("--studies", "policies")
    figures = found["figures"]
    for policy in POLICIES:
        for name in ("rows", "global_excess", "row_local_excess", "moved_experts", "joint_saved"):
            assert f"replay.{policy}.{name}" in figures
        assert policy in found["out"]
    for policy in ("off", "observe", "base", "reschedule"):
        assert figures[f"replay.{policy}.moved_experts"] == 0
        assert figures[f"replay.{policy}.global_excess"] == pytest.approx(
            figures["replay.base.global_excess"]
        )
    assert figures["replay.base.joint_saved"] == 0
    assert figures["replay.full.global_excess"] == pytest.approx(
        figures["replay.reroute.global_excess"]
    )
    assert figures["replay.full.global_excess"] < figures["replay.base.global_excess"]


def test_cluster_mode_never_predicts_a_policy_slower_than_the_rows_it_starts_from(replayed):
    figures = replayed("--mode", "cluster", "--studies", "policies")["figures"]

    def saved(policy):
        return figures[f"replay.{policy}.makespan_saved"]

    assert saved("reschedule") >= max(saved("off"), saved("base")) - 1e-9
    assert saved("full") >= saved("reroute") - 1e-9


def test_all_studies_report_figures_without_nan_and_pictures(replayed, tmp_path):
    found = replayed(
        "--studies", "all", "--ilp-sizes", "16", "--ilp-seconds", "2", "--output", tmp_path / "out"
    )
    figures, skipped = found["figures"], found["skipped"]
    for planner in ("greedy", "few_moves", "eplb_r0", "eplb_r2", "eplb_r4", "eplb_r8"):
        for name in ("hit", "moved", "churn", "p50_seconds"):
            assert f"replay.placement.{planner}.{name}" in figures
        assert 0 <= figures[f"replay.placement.{planner}.hit"] <= 1
        assert 0 <= figures[f"replay.placement.{planner}.churn"] <= 1
    for schedule in ("base", "global_ffd", "slime", "slime_balanced", "nemo_rl", "routepack"):
        for name in ("rows", "utilization", "ep", "dense", "joint"):
            assert f"replay.rescheduling.{schedule}.{name}" in figures
    assert figures["replay.rescheduling.base.joint"] == 1
    assert figures["replay.rescheduling.routepack.joint"] <= (
        figures["replay.rescheduling.global_ffd.joint"] + 1e-9
    )
    for layout in ("base", "reroute", "full"):
        assert figures[f"replay.communication.{layout}.rho_excess"] >= 0
        assert "--tokens" in skipped[f"replay.communication.{layout}.copies"]
    assert figures["replay.skew.hottest_expert"] >= 1
    if "replay.ilp" in skipped:
        assert "ortools" in skipped["replay.ilp"]
    else:
        assert figures["replay.ilp.n16.search"] >= 0
    names = {"figure-5-skew.png", "figure-8-policies.png", "figure-14-schedules.png"}
    assert names <= {path.name for path in (tmp_path / "out").iterdir()}


def test_without_or_tools_the_solver_study_is_skipped_with_the_reason(replayed, monkeypatch):
    for name in ("ortools", "ortools.sat", "ortools.sat.python"):
        monkeypatch.setitem(sys.modules, name, None)
    found = replayed("--studies", "ilp")
    assert "pip install ortools" in found["skipped"]["replay.ilp"]
    assert found["figures"] == {}


def test_a_single_window_has_no_transitions(replayed):
    found = replayed("--windows", "1", "--studies", "placement")
    assert "no transition" in found["skipped"]["replay.placement"]


def test_the_same_proposals_give_the_same_figures(replayed):
    studies = ("--studies", "policies", "rescheduling", "communication", "skew")
    assert replayed(*studies)["figures"] == replayed(*studies)["figures"]


def test_a_preset_needs_no_sizes_and_takes_others(run, tmp_path):
    target = tmp_path / "r.json"
    arguments = ["--windows", "1", "--trajectories", "64", "--studies", "policies"]
    code, out, err = run("replay", "slime:qwen3-235b", *arguments, *QUICK, "--json", target)
    assert code == 0, err
    assert "DP 2, EP 16" in out
    code, out, err = run("replay", "slime:qwen3-235b", *arguments, *QUICK, "--dp", "4")
    assert code == 0, err
    assert "DP 4, EP 16" in out


def _token_file(path, windows, wrong=False):
    """Token-level routing whose counts are those of the first window's first 16 trajectories."""
    window = windows[0]
    rng = np.random.default_rng(0)
    parts = []
    for i in range(16):
        num = int(window.routed_rows[i])
        routed = np.empty((num, window.num_layers, window.top_k), np.uint8)
        for layer in range(window.num_layers):
            ids = np.repeat(np.arange(window.num_experts), window.demand[i, layer])
            routed[:, layer] = ids.reshape(window.top_k, num).T[rng.permutation(num)]
        parts.append(routed)
    if wrong:
        parts[0][0, 0] = parts[0][0, 0, ::-1] ^ 1
    starts = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int32)
    np.savez(
        path,
        routed_experts=np.concatenate(parts),
        cu_seqlens=starts,
        sample_index=np.arange(16, dtype=np.int32),
    )


def test_token_level_routing_gives_deduplicated_copies(replayed, windows, tmp_path):
    _token_file(tmp_path / "tokens.npz", windows)
    figures = replayed("--studies", "communication", "--tokens", tmp_path / "tokens.npz")["figures"]
    for layout in ("base", "reroute", "full"):
        assert 0 < figures[f"replay.communication.{layout}.copies_efficiency"] <= 1
    # at one placement, rescheduling keeps the copies but for those that become local
    assert "replay.communication.full.copies_remote" in figures


def test_token_level_routing_of_another_recording_is_refused(run, source, costs, windows, tmp_path):
    _token_file(tmp_path / "tokens.npz", windows, wrong=True)
    arguments = ["--studies", "communication", "--tokens", tmp_path / "tokens.npz"]
    code, _, err = run("replay", source, *JOB, *QUICK, "--cost", costs, *arguments)
    assert code == 2
    assert "differ from the recorded window" in err


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="slime and SGLang dumps are torch files")


def test_a_slime_dump_is_replayed_with_the_experts_it_does_not_say(run, costs, tmp_path, torch):
    rng = np.random.default_rng(0)
    for rollout in range(2):
        samples = []
        for i in range(16):
            num = int(rng.integers(40, 90))
            routed = np.argsort(rng.random((num - 1, 4, 16)), axis=2)[:, :, :2].astype(np.int32)
            samples.append(
                {
                    "tokens": list(range(num)),
                    "group_index": i // 8,
                    "rollout_routed_experts": torch.from_numpy(routed),
                }
            )
        torch.save({"rollout_id": rollout, "samples": samples}, tmp_path / f"dump_{rollout}.pt")
    arguments = ["--dp", "2", "--ep", "4", "--capacity", "200", *QUICK, "--cost", costs]
    source = tmp_path / "dump_{rollout_id}.pt"
    code, _, err = run("replay", source, *arguments, "--studies", "policies", "placement")
    assert code == 2
    assert "num_experts" in err
    more = ["--num-experts", "16", "--moe-layers", "1-3", "--json", tmp_path / "r.json"]
    code, out, err = run("replay", source, *arguments, *more, "--studies", "policies", "placement")
    assert code == 0, err
    assert "2 windows, 16 trajectories x 3 MoE layers x 16 experts" in out
    assert "replay.placement.greedy.hit" in read_json(tmp_path / "r.json")["figures"]


def test_aggregate_counts_allow_placement_only(run, tmp_path, torch):
    rng = np.random.default_rng(0)
    for k in range(2):
        counts = torch.from_numpy(rng.integers(100, 900, (3, 16)))
        torch.save({"rank": 0, "logical_count": counts}, tmp_path / f"expert_{k}.pt")
    target = tmp_path / "r.json"
    sizes = ["--dp", "2", "--ep", "4", "--capacity", "200", "--top-k", "2"]
    code, _, err = run("replay", tmp_path, *sizes, "--json", target)
    assert code == 0, err
    found = read_json(target)
    assert "aggregate" in found["skipped"]["replay.policies"]
    assert "replay.placement.few_moves.moved" in found["figures"]


def test_labels_give_distances_within_and_across_tasks(replayed, tmp_path):
    lines = ["index,family", *(f"{i},{'math' if i % 16 < 8 else 'code'}" for i in range(48))]
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    found = replayed("--studies", "skew", "--labels", tmp_path / "labels.csv")["figures"]
    assert found["replay.skew.distance_across_tasks"] > 0
    assert found["replay.skew.distance_within_tasks"] > 0


@pytest.mark.parametrize(
    "text", ["", "index\n0\n", "index,label\nfirst,math\n", "index,label\n0,a\n"]
)
def test_incomplete_labels_are_refused(run, source, costs, tmp_path, text):
    path = tmp_path / "labels.csv"
    path.write_text(text)
    arguments = ["--studies", "skew", "--labels", path]
    code, _, err = run("replay", source, *JOB, "--cost", costs, *arguments)
    assert (code, len(err.splitlines())) == (2, 1)
    assert str(path) in err


def test_the_shipped_trace_gives_every_study(run, traces, tmp_path):
    target = tmp_path / "r.json"
    code, _, err = run(
        "replay",
        traces / "counts_703x24x32.npz",
        *("--ep", "4", "--dp", "4", "--capacity", "4096", "--proposals", "40000"),
        *("--studies", "policies", "rescheduling", "communication", "skew"),
        *("--tokens", traces / "routed_experts_64.npz", "--labels", traces / "samples.csv"),
        *("--json", target),
    )
    assert code == 0, err
    figures = read_json(target)["figures"]
    assert figures["replay.full.global_excess"] <= 0.0014
    assert figures["replay.full.joint_saved"] > figures["replay.reschedule.joint_saved"]
    assert figures["replay.full.joint_saved"] > figures["replay.reroute.joint_saved"]
    assert figures["replay.communication.full.copies_efficiency"] > 0.8
    within = figures["replay.skew.distance_within_tasks"]
    assert within < figures["replay.skew.distance_across_tasks"]


def test_json_is_strict(replayed, tmp_path):
    replayed("--studies", "skew")
    assert json.loads((tmp_path / "r.json").read_text())["command"] == "replay"
