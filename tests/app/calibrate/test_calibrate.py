"""Calibration: planted coefficients come back; cells vary what the fit must tell apart."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from tiny import tiny_config

from app.calibrate.calibration import LEAST_R2, Sizes
from app.calibrate.fit import fit_stage, r_squared
from app.calibrate.measure import Times
from app.calibrate.planted import NOISE, plant
from app.calibrate.rank import run_on_device
from app.calibrate.rows import equal_token_cells, features, varied_cells
from app.cli import main
from app.commands import calibrate as command
from app.commands.calibrate import calibrate
from app.config import RanksConfig
from app.local.refit import observe, refit
from app.studies.recording import read_costs


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


CELLS = equal_token_cells(96, 3, np.random.default_rng(0))
SIZES = Sizes(num_fitted=6, num_held_out=4, num_equal=4, num_repeats=1)
ALPHA, BETA = {"attention": 2.0, "dense_ffn": 3.0, "experts": 4.0}, {"attention": 1.5}


def planted_seconds(config, device, cells, num_repeats) -> Times:
    """Milliseconds that follow Equation 2 exactly: constant 1, ALPHA and BETA of a full cell."""
    capacity = config.planner.capacity
    stages = {
        name: np.array(
            [
                1e-3 * (1 + alpha * cell.share(capacity) + BETA.get(name, 0) * cell.pairs(capacity))
                for cell in cells
            ]
        )
        for name, alpha in ALPHA.items()
    }
    return Times(stages=stages, num_layers=dict.fromkeys(stages, 2))


def unrelated_seconds(config, device, cells, num_repeats) -> Times:
    """What a loaded machine measures: dense times that have nothing to do with the cells."""
    rng = np.random.default_rng(3)
    times = planted_seconds(config, device, cells, num_repeats)
    noise = {name: rng.uniform(1e-3, 90e-3, len(cells)) for name in ("attention", "dense_ffn")}
    return replace(times, stages=times.stages | noise)


def shrinking_seconds(config, device, cells, num_repeats) -> Times:
    """Experts that seem faster with more tokens."""
    times = planted_seconds(config, device, cells, num_repeats)
    return replace(times, stages=times.stages | {"experts": 1e-4 / times.stages["experts"]})


@pytest.fixture
def planted_only(monkeypatch) -> None:
    """The planted self-calibration takes seconds and has tests of its own."""
    monkeypatch.setattr(command, "max_relative_error", lambda: 0.05)


def calibrated(folder, time_cells, **more):
    return calibrate(
        tiny_config(),
        device="cpu",
        quick=True,
        output=folder / "c.yaml",
        json_file=str(folder / "c.json"),
        sizes=SIZES,
        time_cells=time_cells,
        **more,
    )


def test_calibrate_writes_a_cost_block_that_the_planner_reads(planted_only, tmp_path, capsys):
    figures = calibrated(tmp_path, planted_seconds)
    cost, move = read_costs(str(tmp_path / "c.yaml"))
    # the unit: two layers' experts take 8 ms on a full cell, so one layer's C x top_k tokens 4 ms,
    # C routed tokens 1 ms at top-4; two layers of attention then cost 4 and 3, of the FFN 6
    assert move.seconds_per_cost == pytest.approx(1e-3)
    assert [stage.name for stage in cost.stages] == ["attention", "dense_ffn"]
    assert cost.alpha.tolist() == pytest.approx([4.0, 6.0])
    assert cost.beta.tolist() == pytest.approx([3.0, 0.0])
    assert figures["calibrate.trusted"] == 1 and figures["calibrate.r2_held_out"] > 0.999
    assert figures["calibrate.seconds_per_row"] == pytest.approx(6e-3)  # three stages of two layers
    assert json.loads((tmp_path / "c.json").read_text())["figures"] == figures
    assert "cost block" in capsys.readouterr().out


def test_a_fit_to_noise_writes_no_block_unless_forced(planted_only, tmp_path, capsys):
    figures = calibrated(tmp_path, unrelated_seconds, num_windows=2)
    assert figures["calibrate.trusted"] == 0 and figures["calibrate.r2_held_out"] < LEAST_R2
    assert not (tmp_path / "c.yaml").exists()
    assert "no cost block" in capsys.readouterr().out
    written = json.loads((tmp_path / "c.json").read_text())
    assert "noise" in written["skipped"]["calibrate.tps_over_default.median"]
    calibrated(tmp_path, unrelated_seconds, force=True)
    assert (tmp_path / "c.yaml").exists()


def test_without_a_unit_of_cost_nothing_is_written_even_by_force(tmp_path):
    with pytest.raises(RuntimeError, match="does not grow with their tokens"):
        calibrated(tmp_path, shrinking_seconds, force=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("trusted", "force", "code"), [(1.0, [], 0), (0.0, [], 1), (0.0, ["--force"], 0)]
)
def test_calibrate_exits_with_1_when_the_fit_is_noise(monkeypatch, tmp_path, trusted, force, code):
    (tmp_path / "run.yaml").write_text("name: x\n")
    monkeypatch.setattr(command, "calibrate", lambda *a, **k: {"calibrate.trusted": trusted})
    assert main(["calibrate", "--config", str(tmp_path / "run.yaml"), *force]) == code


@pytest.mark.ranks
def test_the_models_own_modules_are_timed_on_a_rank(tmp_path):
    """Whatever the machine's speed: every stage of every cell has a positive time."""
    times = run_on_device(replace(tiny_config(), ranks=RanksConfig(world=1, ep=1)), "cpu", CELLS, 1)
    assert set(times.stages) == {*ALPHA, "router_and_shared_expert", "embedding_and_head"}
    for seconds in times.stages.values():
        assert seconds.shape == (len(CELLS),) and (seconds > 0).all()
    assert times.num_layers["attention"] == 4 and times.num_layers["dense_ffn"] == 1


@pytest.mark.ranks
def test_calibrated_costs_are_compared_with_the_default_ones(planted_only, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    figures = calibrated(tmp_path, planted_seconds, num_windows=2)
    for name in ("tps_over_default", "default_over_default"):
        assert figures[f"calibrate.{name}.median"] > 0
