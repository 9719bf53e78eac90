"""Self-calibration in the training loop: slow dense stages are learned and planned with."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from app_ranks.planted_rows import (
    COSTS_SEEN,
    SLOWER,
    calibrating_config,
    planted_rows,
    recording_schedule,
)
from tiny import tiny_config
from wandb_records import offline_runs

from app.commands.train import train
from app.local.self_calibration import SelfCalibration, measured_rows
from app.report.write import render
from planner.placement import Placement
from planner.rows import Rows
from planner.topology import Topology
from planner.window import Window
from rollout_hooks.admission import PlannerCalls


@pytest.mark.ranks
def test_a_slow_dense_stage_is_learned_and_the_next_windows_are_planned_with_it(in_tmp):
    config = calibrating_config()
    calls = PlannerCalls(schedule=recording_schedule)
    figures = train(
        config,
        "full",
        in_tmp / "out",
        str(in_tmp / "t.json"),
        calls=calls,
        report=str(in_tmp / "t.html"),
        row_times=planted_rows,
    )
    content = json.loads((in_tmp / "t.json").read_text())
    windows = content["details"]["windows"]
    assert ["calibrate/drift" in m for m in windows] == [False] * 4 + [True] * 2
    assert figures["train.calibrate.drift"] == pytest.approx(SLOWER - 1, rel=1e-3)
    assert figures["train.calibrate.r2"] == pytest.approx(1.0, abs=1e-6)
    seen = [line.split() for line in (in_tmp / COSTS_SEEN).read_text().splitlines()]
    alpha = {int(window): float(value) for window, value in seen}
    assert all(alpha[w] == pytest.approx(config.cost.alpha.sum()) for w in range(5))
    assert alpha[5] == pytest.approx(SLOWER * config.cost.alpha.sum(), rel=1e-3)

    # heat maps: a picture in wandb every two windows, real files beside the run
    run = offline_runs(in_tmp / "out")[0]
    pictures = [row for row in run.history if "routepack/rank_load/path" in row]
    assert [row["rollout/step"] for row in pictures] == [1, 3, 5]
    assert {row["routepack/rank_load/_type"] for row in pictures} == {"image-file"}
    [folder] = (in_tmp / "out").glob("wandb/offline-run-*/files")
    for row in pictures:
        picture = folder / row["routepack/rank_load/path"]
        assert picture.stat().st_size == row["routepack/rank_load/size"] > 1000

    # the page of a training run has what its JSON holds of the last window
    details = content["details"]
    assert set(details["rows"]) == {"off", "full"}
    lengths = [n for *_, cell in details["rows"]["full"]["cells"] for n in cell]
    assert len(lengths) == 32 and details["rank_load"]["window"] == 5
    page = (in_tmp / "t.html").read_text()
    assert page == render(content, str(in_tmp / "t.json"))
    assert "Load of layer and EP rank" in page and "Not in this file" not in page


def test_off_by_default_and_costs_stay_where_rows_cannot_be_fitted(caplog):
    config = tiny_config()
    assert SelfCalibration(config).add(None, None) == {}
    on = replace(config, planner=replace(config.planner, recalibrate_every=2))
    calibration = SelfCalibration(on, lambda *_: np.ones((1, 1)))
    nothing = SimpleNamespace(windows=[], plans=[])
    assert [calibration.add(nothing, []) for _ in range(2)] == [{}, {}]
    assert calibration.cost == config.cost
    assert "self-calibration keeps the costs it has" in caplog.text


def test_a_fit_to_noise_is_logged_and_not_planned_with(caplog):
    config = calibrating_config()
    rng = np.random.default_rng(0)

    def noisy(*what):
        seconds = planted_rows(*what)
        return seconds * rng.lognormal(0, 0.4, seconds.shape)

    calibration = SelfCalibration(config, noisy)
    rows = 40
    num = rows * config.topology.num_dp_slots
    tokens = rng.integers(5, 40, num)
    demand = np.zeros((num, 3, 16), np.int64)
    demand[np.arange(num), :, rng.integers(0, 16, num)] = 4 * tokens[:, None]
    window = Window(window_id=0, length=tokens + 1, routed_rows=tokens, demand=demand, top_k=4)
    plan = SimpleNamespace(
        rows=Rows(cell=np.arange(num), num_rows=rows, num_dp_slots=2),
        placement=Placement.identity(3, 16, 2),
    )
    admitted = SimpleNamespace(windows=[window], plans=[plan])
    found = [calibration.add(admitted, [None]) for _ in range(5)][-1]
    assert found["calibrate/r2"] < 0.5 and found["calibrate/drift"] > 0
    assert calibration.cost == config.cost
    assert "of the variance of row times, at least 50% are needed" in caplog.text


def test_a_shard_takes_as_long_as_its_slowest_rank():
    topology = Topology.uniform(dp=4, ep=2, edp=2, capacity=8)
    step = SimpleNamespace(row_seconds=np.array([[1.0, 2.0, 3.0, 4.0], [8.0, 7.0, 6.0, 5.0]]))
    assert topology.edp_shards == ((0, 1), (2, 3))
    assert measured_rows(step, None, None, topology).tolist() == [[2, 4], [8, 6]]
