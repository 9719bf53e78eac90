"""Planning may never stop training: every planner fault falls back, is counted and said."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from planner.cost import CostModel, Stage
from planner.placement import Placement
from planner.policy import PlannerOptions, place, schedule
from planner.topology import Topology
from planner.window import Window
from rollout_hooks.admission import Admission, PlannerCalls

COST = CostModel(stages=(Stage(name="attention", alpha=2.0, beta=1.0),))
TOPOLOGY = Topology.uniform(dp=2, ep=2, capacity=64)


def skewed_window() -> Window:
    rng = np.random.default_rng(0)
    rows = rng.integers(4, 30, size=24)
    demand = np.zeros((24, 2, 8), np.int64)
    for i, n in enumerate(rows):
        for layer in range(2):
            favourite = rng.choice(4, size=2, replace=False)
            demand[i, layer, favourite] = n
    return Window(window_id=3, length=rows + 1, routed_rows=rows, demand=demand, top_k=2)


def admission(policy="full", deadline=20.0, calls=None) -> Admission:
    window = skewed_window()
    return Admission(
        window=window,
        topology=TOPOLOGY,
        cost=COST,
        carried=Placement.identity(2, 8, 2),
        policy=policy,
        options=PlannerOptions(stop="cv", budget_seconds=0.02, num_threads=1),
        deadline_seconds=deadline,
        calls=calls or PlannerCalls(),
    )


def raises(*args, **kwargs):
    raise RuntimeError("a planner bug")


def sleeps(*args, **kwargs):
    time.sleep(1.0)
    return schedule(*args, **kwargs)


def loses_a_trajectory(*args, **kwargs):
    result = schedule(*args, **kwargs)
    cell = result.rows.cell.copy()
    cell[0] = -1
    return replace(result, rows=replace(result.rows, cell=cell))


def forgets_a_layer(*args, **kwargs):
    result = place(*args, **kwargs)
    return replace(result, placement=Placement.identity(1, 8, 2))


def test_a_good_planner_gives_its_plan_without_fallback():
    admitted = admission()
    admitted.start_schedule()
    plan = admitted.join()
    assert admitted.fallback is None
    assert plan.policy == "full" and plan.placement.num_moved(Placement.identity(2, 8, 2)) > 0


@pytest.mark.parametrize(
    "calls, deadline, reason",
    [
        (PlannerCalls(schedule=raises), 20.0, "a planner bug"),
        (PlannerCalls(schedule=sleeps), 0.2, "not ready 0.2 s"),
        (PlannerCalls(schedule=loses_a_trajectory), 20.0, "does not validate"),
        (PlannerCalls(place=raises), 20.0, "a planner bug"),
        (PlannerCalls(place=forgets_a_layer), 20.0, "placement covers"),
    ],
    ids=["raises", "overruns", "corrupt rows", "place raises", "corrupt placement"],
)
def test_a_faulty_planner_falls_back_to_base_rows(calls, deadline, reason, caplog):
    window, base = skewed_window(), admission("base")
    base.start_schedule()
    expected = base.join().rows.cell
    admitted = admission(calls=calls, deadline=deadline)
    admitted.start_schedule()
    plan = admitted.join()
    assert reason in admitted.fallback
    assert "training goes on with base rows" in caplog.text
    np.testing.assert_array_equal(plan.rows.cell, expected)
    plan.validate(window, TOPOLOGY, Placement.identity(2, 8, 2))


def test_a_failed_placement_keeps_the_carried_one():
    admitted = admission(calls=PlannerCalls(place=raises))
    assert admitted.placement.num_moved(Placement.identity(2, 8, 2)) == 0


def test_join_before_start_is_a_programming_error():
    with pytest.raises(RuntimeError, match="start_schedule"):
        admission().join()
