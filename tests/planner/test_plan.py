"""Plans: save and load, digest, and everything that validation refuses."""

import dataclasses

import numpy as np
import pytest
from planner_cases import COST, window_of

from planner.placement import Placement
from planner.plan import Plan, PlanError
from planner.policy import PlannerOptions, make_plan
from planner.rows import Rows
from planner.topology import Topology

TOPOLOGY = Topology.uniform(dp=2, ep=4, capacity=100)
CARRIED = Placement.identity(3, 16, 4)


@pytest.fixture(scope="module")
def window():
    return window_of(np.random.default_rng(0).integers(10, 90, 24), window_id=7)


@pytest.fixture(scope="module")
def plan(window):
    options = PlannerOptions(budget_seconds=None, budget_proposals=1000)
    return make_plan(window, TOPOLOGY, COST, CARRIED, "full", options)


def test_plan_has_every_reported_figure(plan):
    names = (
        *("J0_over_B", "J1_over_B", "excess_removed", "reduction", "rows", "rows_bound"),
        *("rows_certified", "token_utilization", "capture_coverage", "moved_experts", "cv_max"),
        *("global_excess", "row_local_excess", "dropped", "joint_cost", "base_joint_cost"),
    )
    for name in names:
        assert isinstance(plan.report[name], float), name


def test_saved_plan_reads_back_equal(plan, tmp_path):
    plan.save(tmp_path / "plan.npz")
    again = Plan.load(tmp_path / "plan.npz")
    assert again.digest() == plan.digest()
    assert again.report == plan.report
    assert (again.rows.cell == plan.rows.cell).all()
    assert (again.placement.expert_of_slot == plan.placement.expert_of_slot).all()
    assert again.placement.version == plan.placement.version == 1


def test_damaged_file_is_named(plan, tmp_path):
    path = tmp_path / "plan.npz"
    data = bytearray(plan.to_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"plan\.npz: not a readable RoutePack plan"):
        Plan.load(path)
    path.write_bytes(plan.to_bytes()[:-30])
    with pytest.raises(ValueError, match=r"plan\.npz"):
        Plan.load(path)


def test_digest_ignores_the_report_and_sees_everything_else(plan):
    assert dataclasses.replace(plan, report={}).digest() == plan.digest()
    cell = plan.rows.cell.copy()
    cell[[0, 1]] = cell[[1, 0]] if cell[0] != cell[1] else [cell[0], -1]
    rows = dataclasses.replace(plan.rows, cell=cell)
    assert dataclasses.replace(plan, rows=rows).digest() != plan.digest()
    for change in ({"window_id": 8}, {"layout_version": 5}, {"policy": "base"}):
        assert dataclasses.replace(plan, **change).digest() != plan.digest()


def moved(plan, i, cell):
    cells = plan.rows.cell.copy()
    cells[i] = cell
    return dataclasses.replace(plan, rows=dataclasses.replace(plan.rows, cell=cells))


def test_validation_refuses(plan, window):
    plan.validate(window, TOPOLOGY, CARRIED)

    def refuse(bad, match, *, window=window, topology=TOPOLOGY, carried=CARRIED):
        with pytest.raises(PlanError, match=match):
            bad.validate(window, topology, carried)

    refuse(dataclasses.replace(plan, window_id=8), "window_id: the plan is for window 8")
    refuse(dataclasses.replace(plan, layout_version=3), "starts from version 3")
    stale = dataclasses.replace(CARRIED, version=2)
    refuse(plan, "carried placement is version 2", carried=stale)
    refuse(plan, "trajectories, the window holds 20", window=window.select(np.arange(20)))
    refuse(moved(plan, 0, -1), "1 trajectories have no cell")
    longest = int(np.argmax(window.length))
    other = int(
        plan.rows.cell[
            longest - 1 if plan.rows.cell[longest - 1] != plan.rows.cell[longest] else longest - 2
        ]
    )
    refuse(moved(plan, longest, other), "above the cap|is empty")
    wide = Topology.uniform(dp=3, ep=4, capacity=100)
    refuse(plan, "num_dp_slots", topology=wide)
    multiple = Topology.uniform(dp=2, ep=4, capacity=100, vpp=2, microbatch_group=97)
    refuse(plan, "multiple of 97", topology=multiple)
    refuse(plan, "num_ep_ranks", topology=Topology.uniform(dp=2, ep=2, capacity=100))
    wrong = dataclasses.replace(plan.placement, version=4)
    refuse(dataclasses.replace(plan, placement=wrong), "placement.version: got 4, expected 1")


def test_an_empty_cell_is_refused(window):
    carried = Placement.identity(3, 16, 4)
    rows = Rows(cell=np.zeros(24, np.int32), num_rows=1, num_dp_slots=2)
    plan = Plan(policy="base", window_id=7, layout_version=0, placement=carried, rows=rows)
    with pytest.raises(PlanError, match="row 0, DP slot 1 is empty"):
        plan.validate(window, TOPOLOGY, carried)
