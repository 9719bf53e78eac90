"""`routepack bench`: the figures' names and bars; measured values are checked only for sense."""

from __future__ import annotations

import numpy as np
import pytest
from replay_cases import CORPUS, read_json
from tiny import tiny_config

from app.bench import admission, placement, schedule, slime
from app.bench.bars import BARS, Bar, bar_of, missed
from app.bench.scale_worker import large_window, measure
from app.config import PlannerConfig
from app.studies.recording import Recording
from app.studies.skew import sqrt_jsd
from planner.cost import CostModel, Stage
from planner.move_cost import MoveCost
from planner.policy import PlannerOptions
from planner.recorded.synthetic import synthetic_windows
from planner.topology import Topology

ISSUE = (
    "placement.greedy_speedup_vs_eplb",
    "placement.cv_hit",
    "placement.few_moves_cv_hit",
    "placement.few_moves_ratio",
    "schedule.proposals_per_s_core",
    "schedule.reference_eta",
    "schedule.eta_gain_1s",
    "schedule.eta_gain_3s",
    "schedule.eta_gain_worst",
    "schedule.j1_over_bound_3s",
    "schedule.seconds_to_reference",
    "rows.certified_inline",
)


@pytest.fixture(scope="module")
def recording() -> Recording:
    """Three small windows on D = P = 4, one EDP shard."""
    return Recording(
        name="small",
        windows=list(synthetic_windows(CORPUS, 3, seed=5)),
        topology=Topology.uniform(dp=4, ep=4, capacity=1600),
        cost=CostModel(stages=(Stage(name="dense", alpha=3.0, beta=0.5),)),
        move=MoveCost(),
    )


@pytest.mark.parametrize("name", ISSUE)
def test_every_barred_figure_has_a_bar_for_both_models(name):
    assert {f"{name}.tiny", f"{name}.flash"} <= set(BARS)


def test_bars_know_which_side_is_missed():
    assert Bar(">=", 2).met(2) and not Bar(">=", 2).met(1.9)
    assert Bar("<=", 2).met(2) and not Bar("<=", 2).met(2.1)
    assert missed({"scale.seconds": 11.0, "scale.eta": 50.0, "unknown": 0.0}) == ["scale.seconds"]
    assert bar_of("slime.saved_full_vs_off.glm5") == Bar(">=", 0)
    assert bar_of("slime.residual_vs_oracle.glm5") is None


def test_placement_figures(recording):
    found = placement.measure(recording, "test")
    assert {"greedy_speedup_vs_eplb", "cv_hit", "few_moves_cv_hit", "few_moves_ratio"} <= set(found)
    assert 0 <= found["cv_hit"] <= 1
    assert found["few_moves_ratio"] > 0


def test_schedule_figures(recording, monkeypatch):
    monkeypatch.setattr(schedule, "PAPER_PROPOSALS", 20_000)
    monkeypatch.setattr(schedule, "SPEED_PROPOSALS", 20_000)
    monkeypatch.setattr(schedule, "CALIBRATION", (2_000, 6_000))
    monkeypatch.setattr(schedule, "calibrate", lambda instance, engine: lambda cpu: 10_000)
    options = PlannerOptions(rows="paper", stop="cv")
    seen = schedule.Seen()
    for number, window in enumerate(recording.windows):
        instance = schedule.instance_of(window, recording, options)
        assert instance.bound <= instance.global_ffd
        reference = schedule.compare_at_equal_proposals(instance, seen)
        schedule.compare_at_equal_cpu(instance, reference, number, seen)
    found = schedule._figures(seen)
    for name in ISSUE:
        if name.startswith("schedule."):
            assert np.isfinite(found[name.removeprefix("schedule.")])
    assert found["j1_over_bound_3s"] >= 1
    assert 0 <= found["reference_eta"] <= 100


def test_calibration_affords_more_proposals_for_more_seconds(recording):
    options = PlannerOptions(rows="paper", stop="cv")
    instance = schedule.instance_of(recording.windows[0], recording, options)
    affords = schedule.calibrate(instance, "pair_anneal")
    assert affords(4.0) > affords(2.0) >= schedule.CALIBRATION[0]


def test_slime_policies_never_lose_to_the_rows_they_start_from(recording):
    options = PlannerOptions(
        rows="makespan",
        stop="net_benefit",
        rows_from="slime",
        budget_seconds=None,
        budget_proposals=20_000,
    )
    found = slime.measure(recording, options)
    assert found["saved_reschedule_vs_off"] >= 0
    assert found["full_over_reroute"] <= 1 + 1e-9
    assert found["residual_vs_oracle"] >= -1e-9


def test_large_windows_are_whole():
    window = large_window(64, 2, 64, 16)
    assert window.num_trajectories == 64
    assert (window.demand.sum(axis=2) == window.length[:, None] * window.top_k).all()
    with pytest.raises(ValueError, match="multiple of"):
        large_window(600, 2, 64, 16)


def test_a_scale_point_reports_seconds_and_memory():
    found = measure(
        {
            "num": 64,
            "num_layers": 2,
            "num_experts": 64,
            "num_ranks": 16,
            "dp": 4,
            "proposals": 2000,
        }
    )
    assert found["seconds"] > 0
    assert found["peak_mb"] >= found["window_mb"] > 0


def test_an_unknown_bench_is_named(run):
    code, _, err = run("bench", "speed")
    assert code == 2 and "'speed'" in err and "placement" in err


def test_bench_writes_figures_and_what_quick_left_out(run, tmp_path):
    code, out, err = run("bench", "rows", "--quick", "--json", tmp_path / "b.json")
    assert code == 0, err
    found = read_json(tmp_path / "b.json")
    assert "of 20" in found["skipped"]["rows.certified_inline.tiny"]
    assert 0 <= found["figures"]["rows.certified_share.flash"] <= 1
    assert found["details"]["missed"] == []
    assert "rows.certified_share.tiny" in out


@pytest.mark.ranks
def test_bench_admission_measures_a_real_admission_beside_its_bars(run, tmp_path, monkeypatch):
    """Toy sizes: the figures must be there and make sense, not meet their bars."""
    config = tiny_config(planner=PlannerConfig(capacity=96, budget_seconds=0.02, stop="cv"))
    monkeypatch.setattr(admission, "CONFIG", config)
    monkeypatch.setattr(admission, "QUICK_WINDOWS", 1)
    monkeypatch.setattr(admission, "QUICK_REPEATS", 2)
    code, out, err = run("bench", "admission", "--quick", "--json", tmp_path / "b.json")
    assert code == 0, err
    found = read_json(tmp_path / "b.json")["figures"]
    assert 0 <= found["admission.overlap"] <= 1
    assert found["admission.gate_tail_ms"] >= 0 and found["admission.exposed_ms"] >= 0
    assert found["admission.state_seconds"] > found["admission.restore_seconds"] > 0
    assert found["admission.plan_seconds"] >= 0.02
    assert found["admission.moved_experts"] > 0 and found["admission.moved_mb"] > 0
    for name in ("exposed_over_allowed", "gate_tail_ms", "state_slowdown"):
        assert f"admission.{name}" in BARS and f"admission.{name}" in out


def test_sqrt_jsd_is_a_distance():
    rng = np.random.default_rng(0)
    profile = rng.random((4, 3, 8))
    profile[0, 0, 0] = 0.0
    profile /= profile.sum(axis=2, keepdims=True)
    distance = sqrt_jsd(profile)
    assert np.allclose(distance, distance.T)
    assert np.allclose(np.diag(distance), 0)
    assert (distance[~np.eye(4, dtype=bool)] > 0).all()
    assert distance.max() <= np.sqrt(np.log(2)) + 1e-12
