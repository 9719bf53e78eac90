"""Calibration: planted coefficients come back; cells vary what the fit must tell apart."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import yaml
from tiny import tiny_config

from app.calibrate.fit import fit_stage, r_squared
from app.calibrate.planted import NOISE, plant
from app.calibrate.rows import equal_token_cells, features, varied_cells
from app.cli import main
from app.local.refit import observe, refit


def test_cells_hold_what_they_promise():
    rng = np.random.default_rng(0)
    equal = equal_token_cells(512, 14, rng)
    assert {sum(cell.length) for cell in equal} == {459}
    assert len({round(cell.pairs(512), 3) for cell in equal}) > 5
    varied = varied_cells(512, 21, rng)
    totals = sorted(sum(cell.length) for cell in varied)
    assert totals[0] <= 0.41 * 512 and totals[-1] == 511
    assert all(total % 2 for total in totals)
    assert min(min(cell.length) for cell in varied) >= 1


def test_planted_coefficients_of_a_stage_come_back():
    rng = np.random.default_rng(1)
    found = features(varied_cells(512, 28, rng), 512)
    noise = 1 + 0.02 * rng.standard_normal(len(found))
    fit = fit_stage("attention", found, (5e-4 + found @ [3e-3, 2e-3]) * noise)
    assert fit.constant == pytest.approx(5e-4, abs=1e-4)
    assert fit.linear == pytest.approx(3e-3, rel=0.05)
    assert fit.pairs == pytest.approx(2e-3, rel=0.1)
    assert fit.r2 > 0.9


def test_a_coefficient_never_turns_negative():
    found = features(varied_cells(512, 20, np.random.default_rng(2)), 512)
    fit = fit_stage("attention", found, found @ [3e-3, -5e-4] + 1e-4)
    assert fit.linear > 0 and fit.pairs == 0 and fit.constant >= 0


def test_impossible_times_are_refused():
    found = np.ones((3, 2))
    with pytest.raises(ValueError, match="stage ffn: every measured time must be positive"):
        fit_stage("ffn", found, np.array([1.0, 0.0, 1.0]))
    with pytest.raises(ValueError, match="1 times for 1 cells"):
        fit_stage("ffn", found[:1], np.ones(1))


def test_r_squared_of_the_mean_is_zero():
    assert r_squared(np.array([1.0, 2.0, 3.0]), np.full(3, 2.0)) == 0.0


@pytest.fixture(scope="module")
def planted():
    return plant()


def test_self_calibration_recovers_planted_coefficients(planted, record_property):
    found = [refit(planted.observations(NOISE, seed), planted.source.cost) for seed in range(4)]
    assert all(f.tells_pairs and f.error < 0.15 for f in found)
    worst = max(planted.error(f) for f in found)
    record_property("selfcalibrate.max_rel_error", worst)
    assert worst <= 0.1


def test_exact_times_give_exact_coefficients_and_the_drift(planted):
    found = refit(planted.observations(0.0), planted.source.cost)
    assert planted.error(found) < 1e-6
    assert found.drift == pytest.approx(0.3, abs=1e-6) and found.r2 == pytest.approx(1.0)


def test_rows_that_cannot_tell_pairs_share_one_factor():
    # nearly every cell of this preset holds one trajectory of one length
    planted = plant("synthetic:tiny", (1.0, 1.0, 1e-3), num_windows=3)
    found = refit(planted.observations(0.05), planted.source.cost)
    assert not found.tells_pairs
    assert found.drift < 0.15


def test_self_calibration_refuses_what_it_cannot_use(planted):
    cost, one = planted.source.cost, planted.observations(0.0)[0]
    names = ("linear", "pairs", "expert", "seconds")
    few = replace(one, **{name: getattr(one, name)[:1] for name in names})
    with pytest.raises(ValueError, match="16 rows, at least 30"):
        refit([few], cost)
    with pytest.raises(ValueError, match="every row time must be positive"):
        refit([replace(one, seconds=0 * one.seconds)], cost)
    window, plan, seconds = planted.windows[0]
    with pytest.raises(ValueError, match="the rows need"):
        observe(window, plan.rows, planted.source.topology, plan.placement, seconds[:1])


@pytest.mark.ranks
def test_calibrate_writes_a_cost_block_that_the_planner_reads(tmp_path, monkeypatch):
    from app.commands import calibrate as command
    from app.config import load_config
    from app.studies.recording import read_costs

    monkeypatch.setattr(command, "max_relative_error", lambda: 0.05)
    monkeypatch.setattr(
        command, "QUICK", command.Sizes(num_fitted=4, num_held_out=2, num_equal=2, num_repeats=1)
    )

    config = tiny_config()
    monkeypatch.chdir(tmp_path)
    figures = command.calibrate(
        config,
        device="cpu",
        quick=True,
        output=tmp_path / "c.yaml",
        json_file=str(tmp_path / "c"),
        num_windows=2,
    )
    cost, move = read_costs(str(tmp_path / "c.yaml"))
    assert [stage.name for stage in cost.stages] == ["attention", "dense_ffn"]
    assert move.seconds_per_cost > 0 and cost.alpha.sum() > 0  # toy sizes: mostly launch time
    assert json.loads((tmp_path / "c").read_text())["figures"] == figures
    assert {"calibrate.r2_held_out", "calibrate.r2_equal_tokens"} <= set(figures)
    assert 0.2 < figures["calibrate.tps_over_default.median"] < 5
    assert main(["report", str(tmp_path / "c"), "--output", str(tmp_path / "c.html")]) == 0
    block = yaml.safe_load((tmp_path / "c.yaml").read_text())
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"planner": {"stages": block["stages"]}}))
    assert load_config(tmp_path / "run.yaml").cost == cost
