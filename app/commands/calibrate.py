"""`routepack calibrate`: measure the model's modules, fit Equation 2, write the cost block."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import yaml

from app.calibrate.fit import StageFit, fit_stage, r_squared
from app.calibrate.planted import max_relative_error
from app.calibrate.rows import Cell, equal_token_cells, features, varied_cells
from app.commands.arguments import add_json, positive
from app.config import RanksConfig, RunConfig
from app.results.figures import write_figures
from app.results.progress import print_table
from planner.cost import CostModel, Stage

ATTENTION, DENSE_FFN, EXPERTS = "attention", "dense_ffn", "experts"
LINEAR_MODULES = ("dense_ffn", "router_and_shared_expert", "embedding_and_head")
"""Modules whose time grows with tokens alone: one slowest slot, so one stage."""


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
        "--output", metavar="YAML", default="cost.yaml", help="the cost block (default cost.yaml)"
    )
    add_json(command)


def run(arguments: argparse.Namespace) -> int | None:
    from dataclasses import replace

    from app.config import load_config

    config = load_config(arguments.config)
    if arguments.seed is not None:
        config = replace(config, seed=arguments.seed)
    calibrate(
        config,
        device=arguments.device,
        quick=arguments.quick,
        num_windows=arguments.compare,
        output=Path(arguments.output),
        json_file=arguments.json,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Cells to fit, cells held out, cells of equal tokens (held out too), and timed repeats."""

    num_fitted: int = 21
    num_held_out: int = 14
    num_equal: int = 14
    num_repeats: int = 5


QUICK = Sizes(num_fitted=14, num_held_out=7, num_equal=7, num_repeats=3)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Calibration:
    """Fitted stages, in seconds of all layers, and the cells they were judged on.

    Cells: the fitted ones first, then held out, then equal tokens.
    """

    fits: dict[str, StageFit]
    cells: Sequence[Cell]
    capacity: int
    stage_seconds: dict[str, np.ndarray]
    """[cell] measured seconds by stage."""
    expert_seconds: float
    """Seconds of C routed tokens on one EP rank in one layer: the unit of cost."""

    @property
    def measured(self) -> np.ndarray:
        """[cell] seconds of a row: all stages."""
        return sum(self.stage_seconds.values())

    @property
    def predicted(self) -> np.ndarray:
        """[cell] predicted seconds of a row: all stages."""
        return sum(self.stage_predicted().values())

    def stage_predicted(self) -> dict[str, np.ndarray]:
        """[cell] predicted seconds by stage."""
        found = features(self.cells, self.capacity)
        return {name: fit.predict(found) for name, fit in self.fits.items()}

    @property
    def cost(self) -> CostModel:
        """Coefficients in the planner's unit."""
        stages = [
            Stage(
                name=name,
                alpha=self.fits[name].linear / self.expert_seconds,
                beta=self.fits[name].pairs / self.expert_seconds,
            )
            for name in (ATTENTION, DENSE_FFN)
        ]
        return CostModel(stages=tuple(stages))


def calibrate(
    config: RunConfig,
    *,
    device: str,
    quick: bool,
    output: Path,
    json_file: str | None,
    num_windows: int | None = None,
) -> dict[str, float]:
    """Measure, fit, judge, write `output` (YAML) and the figures; return the figures.

    num_windows: windows of a paired comparison of TPS with the default costs; None for none.
    Raises ValueError when the device is not there or `output` is not a YAML name.
    """
    if output.suffix not in (".yaml", ".yml"):
        raise ValueError(f"--output: got {output}, expected a name that ends in .yaml")
    sizes = QUICK if quick else Sizes()
    calibration = measure(config, device, sizes)
    figures = calibration_figures(calibration, sizes)
    default = replace(config, planner=replace(config.planner, stages=())).cost
    _write_cost(output, calibration, config, device)
    figures["selfcalibrate.max_rel_error"] = max_relative_error()
    _print(calibration, default, figures, output)
    skipped = {}
    if num_windows is None:
        skipped["calibrate.tps_over_default.median"] = "not asked for: give --compare N"
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


def measure(config: RunConfig, device: str, sizes: Sizes) -> Calibration:
    """Time the cells on one rank with one EP rank's experts, and fit the fitted ones."""
    from app.calibrate.rank import run_on_device

    capacity = config.planner.capacity
    rng = np.random.default_rng(config.seed)
    cells = varied_cells(capacity, sizes.num_fitted, rng)
    cells += varied_cells(capacity, sizes.num_held_out, rng)
    cells += equal_token_cells(capacity, sizes.num_equal, rng)
    model = replace(
        config.model, num_experts=config.model.num_experts // config.ranks.ep, num_groups=1
    )
    if model.num_experts < model.top_k:
        model = replace(model, top_k=model.num_experts)
    one_rank = replace(config, model=model, ranks=RanksConfig(world=1, ep=1))
    times = run_on_device(one_rank, device, cells, sizes.num_repeats)
    found = features(cells, capacity)
    scaled = {name: seconds * times.num_layers[name] for name, seconds in times.stages.items()}
    dense = sum(scaled[name] for name in LINEAR_MODULES if name in scaled)
    stages = {ATTENTION: scaled[ATTENTION], DENSE_FFN: dense, EXPERTS: scaled[EXPERTS]}
    fitted = slice(sizes.num_fitted)
    fits = {
        name: fit_stage(name, found[fitted], seconds[fitted], has_pairs=name == ATTENTION)
        for name, seconds in stages.items()
    }
    per_layer = fits[EXPERTS].linear / times.num_layers[EXPERTS]
    return Calibration(
        fits=fits,
        cells=cells,
        capacity=capacity,
        stage_seconds=stages,
        expert_seconds=per_layer / model.top_k,
    )


def calibration_figures(calibration: Calibration, sizes: Sizes) -> dict[str, float]:
    """Figures `calibrate.*`: per-stage R^2, and held-out R^2 and error of whole rows."""
    first = sizes.num_fitted
    parts = {
        "held_out": slice(first, first + sizes.num_held_out),
        "equal_tokens": slice(first + sizes.num_held_out, None),
    }
    figures = {}
    for name, part in parts.items():
        measured, predicted = calibration.measured[part], calibration.predicted[part]
        error = np.abs(predicted / measured - 1)
        figures[f"calibrate.r2_{name}"] = r_squared(measured, predicted)
        figures[f"calibrate.error_{name}.median"] = float(np.median(error))
        figures[f"calibrate.error_{name}.max"] = float(error.max())
    for name, fit in calibration.fits.items():
        figures[f"calibrate.{name}.r2"] = fit.r2
    for stage in calibration.cost.stages:
        figures[f"calibrate.{stage.name}.alpha"] = stage.alpha
        figures[f"calibrate.{stage.name}.beta"] = stage.beta
    figures["calibrate.seconds_per_cost"] = calibration.expert_seconds
    constants = sum(fit.constant for fit in calibration.fits.values())
    figures["calibrate.seconds_per_row"] = constants
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
    calibration: Calibration, default: CostModel, figures: dict[str, float], output: Path
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
    print(f"cost block: {output} (use it with --cost, or put stages under planner.stages)")
