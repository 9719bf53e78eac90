"""`routepack plan` writes a plan that training may load; `routepack show` reads it back."""

from __future__ import annotations

import numpy as np
import pytest
from replay_cases import JOB, QUICK, read_json, rewrite

from app.commands.plan_file import load_plan_file
from planner.placement import Placement
from planner.plan import Plan
from planner.topology import Topology


@pytest.fixture
def planned(run, source, costs, tmp_path):
    """Plan a window of the small source; the path of the plan."""

    def call(name: str = "plan.npz", *more: str):
        path = tmp_path / name
        arguments = [*JOB, *QUICK, "--cost", costs, "--output", path, *more]
        code, _, err = run("plan", source, *arguments, "--json", tmp_path / f"{name}.json")
        assert code == 0, err
        return path

    return call


@pytest.mark.parametrize("policy", ["off", "base", "reschedule", "reroute", "full"])
def test_a_written_plan_may_be_executed(planned, windows, policy):
    path = planned("p.npz", "--policy", policy, "--window", "1")
    plan = Plan.load(path)
    identity = Placement.identity(3, 16, 4)
    plan.validate(windows[1], Topology.uniform(dp=4, ep=4, capacity=1600), identity)
    assert plan.policy == policy


def test_show_prints_what_plan_wrote(planned, run, tmp_path):
    path = planned()
    code, out, err = run(
        "show", path, "--json", tmp_path / "s.json", "--output", tmp_path / "p.png"
    )
    assert code == 0, err
    written, shown = read_json(f"{path}.json"), read_json(tmp_path / "s.json")
    assert shown["figures"] == written["figures"]
    assert shown["details"]["digest"] == written["details"]["digest"]
    assert shown["details"]["digest"][:16] in out
    assert "stop_reason" in out
    assert (tmp_path / "p.png").stat().st_size > 0


def test_the_drawing_adds_up_to_the_window_and_the_score(planned, windows):
    plan, drawing = load_plan_file(planned())
    assert (drawing.length == windows[0].length).all()
    assert drawing.load_after.sum() == windows[0].demand.sum(dtype=np.int64)
    joint = (drawing.dense + drawing.expert).sum(axis=0).max()
    assert joint == pytest.approx(plan.report["joint_cost"])
    assert (drawing.cell_work.max(axis=1) <= drawing.dense.max(axis=1) + 1e-9).all()


def test_a_plan_of_training_is_shown_without_lengths(planned, run, tmp_path):
    plan = Plan.load(planned())
    plan.save(tmp_path / "bare.npz")
    code, out, err = run("show", tmp_path / "bare.npz", "--output", tmp_path / "bare.png")
    assert code == 0, err
    assert "not in this file" in out
    assert (tmp_path / "bare.png").stat().st_size > 0


def test_a_damaged_drawing_is_refused(planned, run):
    path = planned()
    rewrite(path, drawing_length=np.zeros(3, np.int64))
    code, _, err = run("show", path)
    assert (code, len(err.splitlines())) == (2, 1)
    assert "drawing" in err


def test_the_placement_of_an_earlier_plan_is_carried(planned):
    first = Plan.load(planned("a.npz"))
    second = Plan.load(planned("b.npz", "--window", "1", "--carried", "a.npz"))
    assert second.layout_version == first.placement.version
    cold = Plan.load(planned("c.npz", "--window", "1"))
    assert second.report["moved_experts"] <= cold.report["moved_experts"]


@pytest.fixture(autouse=True)
def _inside(in_tmp):
    """Relative plan names resolve in the test's folder."""
