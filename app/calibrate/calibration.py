"""From timed cells to fitted stages, and how well they predict cells that they have not seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from app.calibrate.fit import StageFit, fit_stage, r_squared
from app.calibrate.rows import Cell, equal_token_cells, features, varied_cells
from app.config import RanksConfig, RunConfig
from planner.cost import CostModel, Stage

if TYPE_CHECKING:
    from app.calibrate.measure import Times

ATTENTION, DENSE_FFN, EXPERTS = "attention", "dense_ffn", "experts"
LINEAR_MODULES = ("dense_ffn", "router_and_shared_expert", "embedding_and_head")
"""Modules whose time grows with tokens alone: one slowest slot, so one stage."""

LEAST_R2 = 0.8
"""Held-out rows must be predicted at least so well: below, the fit is noise."""

TimeCells = Callable[[RunConfig, str, Sequence[Cell], int], "Times"]
"""(configuration of one rank, device, cells, repeats) to the stages' seconds."""


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


def measure(config: RunConfig, device: str, sizes: Sizes, time_cells: TimeCells) -> Calibration:
    """Time the cells on one rank with one EP rank's experts, and fit the fitted ones.

    Raises RuntimeError where the experts' time does not grow with their tokens.
    """
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
    times = time_cells(one_rank, device, cells, sizes.num_repeats)
    found = features(cells, capacity)
    scaled = {name: seconds * times.num_layers[name] for name, seconds in times.stages.items()}
    dense = sum(scaled[name] for name in LINEAR_MODULES if name in scaled)
    stages = {ATTENTION: scaled[ATTENTION], DENSE_FFN: dense, EXPERTS: scaled[EXPERTS]}
    fitted = slice(sizes.num_fitted)
    fits = {
        name: fit_stage(name, found[fitted], seconds[fitted], has_pairs=name == ATTENTION)
        for name, seconds in stages.items()
    }
    if not fits[EXPERTS].linear:
        raise RuntimeError(
            "the measured time of the experts does not grow with their tokens, so there is no unit "
            "of cost: the times are noise. Nothing was written; run again on a quiet machine, "
            "without --quick"
        )
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
