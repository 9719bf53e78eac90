"""`routepack calibrate`: measure the model's modules, fit Equation 2, write the cost block."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path

import yaml

from app.calibrate.calibration import (
    EXPERTS,
    LEAST_R2,
    QUICK,
    Calibration,
    Sizes,
    TimeCells,
    calibration_figures,
    measure,
)
from app.calibrate.planted import max_relative_error
from app.calibrate.rank import run_on_device
from app.commands.arguments import add_json, positive, run_config
from app.config import RunConfig
from app.results.figures import write_figures
from app.results.progress import print_table
from planner.cost import CostModel


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", required=True, metavar="FILE", help="YAML of the run")
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    command.add_argument("--quick", action="store_true", help="fewer rows and repeats")
    command.add_argument(
        "--compare",
        type=positive,
        metavar="N",
        help="then train N windows under both cost models, paired, and report the TPS ratio",
    )
    command.add_argument("--seed", type=int, help="replaces the configuration's seed")
    command.add_argument(
        "--force",
        action="store_true",
        help=f"write the block even where held-out rows are predicted with R2 below {LEAST_R2}",
    )
    command.add_argument(
        "--output", metavar="YAML", default="cost.yaml", help="the cost block (default cost.yaml)"
    )
    add_json(command)


def run(arguments: argparse.Namespace) -> int | None:
    figures = calibrate(
        run_config(arguments),
        device=arguments.device,
        quick=arguments.quick,
        num_windows=arguments.compare,
        output=Path(arguments.output),
        json_file=arguments.json,
        force=arguments.force,
    )
    return 0 if arguments.force or figures["calibrate.trusted"] else 1


def calibrate(
    config: RunConfig,
    *,
    device: str,
    quick: bool,
    output: Path,
    json_file: str | None,
    num_windows: int | None = None,
    force: bool = False,
    sizes: Sizes | None = None,
    time_cells: TimeCells = run_on_device,
) -> dict[str, float]:
    """Measure, fit, judge, write `output` (YAML) and the figures; return the figures.

    num_windows: windows of a paired comparison of TPS with the default costs; None for none.
    A fit that predicts held-out rows with R2 below LEAST_R2 is noise: `calibrate.trusted` is 0,
    and neither block nor comparison is made unless `force`. sizes, time_cells: what is timed, and
    by whom; the defaults follow `quick` and measure this machine.
    Raises ValueError when the device is not there or `output` is not a YAML name.
    """
    if output.suffix not in (".yaml", ".yml"):
        raise ValueError(f"--output: got {output}, expected a name that ends in .yaml")
    sizes = sizes or (QUICK if quick else Sizes())
    calibration = measure(config, device, sizes, time_cells)
    figures = calibration_figures(calibration, sizes)
    default = replace(config, planner=replace(config.planner, stages=())).cost
    trusted = figures["calibrate.r2_held_out"] >= LEAST_R2
    figures["calibrate.trusted"] = float(trusted)
    if trusted or force:
        _write_cost(output, calibration, config, device)
    figures["selfcalibrate.max_rel_error"] = max_relative_error()
    _print(calibration, default, figures, output if trusted or force else None)
    skipped = {}
    if num_windows is None:
        skipped["calibrate.tps_over_default.median"] = "not asked for: give --compare N"
    elif not (trusted or force):
        skipped["calibrate.tps_over_default.median"] = "the fit is noise: held-out R2 is too low"
    else:
        figures |= _compare(config, calibration.cost, num_windows)
    details = {
        "device": device,
        "capacity": config.planner.capacity,
        "cells": [list(cell.length) for cell in calibration.cells],
        "sizes": asdict(sizes),
        "measured": calibration.measured.tolist(),
        "predicted": calibration.predicted.tolist(),
        "stage_measured": {n: x.tolist() for n, x in calibration.stage_seconds.items()},
        "stage_predicted": {n: x.tolist() for n, x in calibration.stage_predicted().items()},
        "residuals": {name: fit.residual.tolist() for name, fit in calibration.fits.items()},
        "default_stages": [asdict(stage) for stage in default.stages],
        "stages": [asdict(stage) for stage in calibration.cost.stages],
    }
    write_figures(json_file, "calibrate", figures, skipped, details)
    return figures


def _compare(config: RunConfig, cost: CostModel, num_windows: int) -> dict[str, float]:
    """Figures of the paired comparison, printed in one line."""
    from app.calibrate.paired import tps_over_default

    found = tps_over_default(config, cost, num_windows)
    ratio, control = found["tps_over_default"], found["default_over_default"]
    print(
        f"full, TPS under calibrated over default costs: {ratio.median:.3f} [{ratio.low:.3f}, "
        f"{ratio.high:.3f}] in {num_windows} windows; default over default {control.median:.3f} "
        f"[{control.low:.3f}, {control.high:.3f}]"
    )
    figures: dict[str, float] = {}
    for name, values in found.items():
        figures |= values.figures(f"calibrate.{name}")
    return figures


def _write_cost(path: Path, calibration: Calibration, config: RunConfig, device: str) -> None:
    stages = [
        {"name": s.name, "alpha": round(s.alpha, 6), "beta": round(s.beta, 6)}
        for s in calibration.cost.stages
    ]
    move = {"seconds_per_cost": round(calibration.expert_seconds, 9)}
    text = (
        f"# routepack calibrate: {config.name} on {device}, C = {config.planner.capacity} tokens.\n"
        "# For --cost of replay, plan and advise; in a run's YAML the same list stands under\n"
        "# planner.stages. Unit: C routed tokens on the busiest EP rank of one layer cost 1.\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + yaml.safe_dump({"stages": stages, "move": move}, sort_keys=False))


def _print(
    calibration: Calibration, default: CostModel, figures: dict[str, float], output: Path | None
) -> None:
    rows = []
    for stage in calibration.cost.stages:
        fit = calibration.fits[stage.name]
        rows.append([stage.name, f"{stage.alpha:.3f}", f"{stage.beta:.3f}", f"{fit.r2:.3f}"])
    expert_r2 = f"{calibration.fits[EXPERTS].r2:.3f}"
    rows.append(
        [f"{EXPERTS} (unit, {1e3 * calibration.expert_seconds:.2f} ms)", "1", "0", expert_r2]
    )
    rows += [[f"default: {s.name}", f"{s.alpha:.3f}", f"{s.beta:.3f}", "-"] for s in default.stages]
    print_table("Fitted cost of a full cell", ("stage", "alpha", "beta", "R2 (fitted)"), rows)
    rows = [
        [
            words,
            f"{figures[f'calibrate.r2_{name}']:.3f}",
            f"{figures[f'calibrate.error_{name}.median']:.1%}",
            f"{figures[f'calibrate.error_{name}.max']:.1%}",
        ]
        for name, words in (("held_out", "held out"), ("equal_tokens", "equal tokens, held out"))
    ]
    print_table("Rows the fit has not seen", ("rows", "R2", "median error", "max error"), rows)
    print(f"a row costs {1e3 * figures['calibrate.seconds_per_row']:.1f} ms whatever it holds")
    error = figures["selfcalibrate.max_rel_error"]
    print(f"self-calibration brings planted coefficients back within {error:.1%} (5% noise)")
    if output is None:
        print(
            f"no cost block: held-out R2 {figures['calibrate.r2_held_out']:.2f} is below "
            f"{LEAST_R2}, the times are noise. Run again on a quiet machine, without --quick, or "
            "with --force"
        )
    else:
        print(f"cost block: {output} (use it with --cost, or put stages under planner.stages)")
