"""The check of self-calibration: plant coefficients, add noise, see how well they come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from app.local.refit import Refit, RowObservation, observe, refit
from planner.cost import CostModel
from planner.placement import Placement
from planner.plan import Plan
from planner.policy import PlannerOptions, make_plan
from planner.recorded import preset
from planner.recorded.presets import Preset
from planner.score import rank_demand, row_costs
from planner.window import Window

SOURCE = "slime:minimax-m2"
"""A shape of slime's whose cells mix lengths, so that rows can tell attention pairs from tokens."""
NUM_WINDOWS, NOISE, NUM_SEEDS = 20, 0.05, 4
FACTORS = (1.3, 0.7, 2e-3)
"""Planted alpha and beta over the preset's, and seconds per unit of cost."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Planted:
    """Base-planned windows of a preset with the exact row times of planted coefficients.

    windows: (window, plan, seconds [row, EDP shard]).
    """

    source: Preset
    cost: CostModel
    seconds_per_cost: float
    windows: Sequence[tuple[Window, Plan, np.ndarray]]

    def observations(self, noise: float, seed: int = 0) -> list[RowObservation]:
        """What training would have seen, with `noise` as the standard deviation of a row's time."""
        rng = np.random.default_rng(seed)
        topology = self.source.topology
        return [
            observe(
                window,
                plan.rows,
                topology,
                plan.placement,
                seconds * (1 + noise * rng.standard_normal(seconds.shape)),
            )
            for window, plan, seconds in self.windows
        ]

    def error(self, found: Refit) -> float:
        """Largest relative error of a coefficient or of the seconds per unit of cost."""
        has_pairs = self.cost.beta > 0
        errors = [
            *(found.cost.alpha / self.cost.alpha - 1),
            *(found.cost.beta[has_pairs] / self.cost.beta[has_pairs] - 1),
            found.seconds_per_cost / self.seconds_per_cost - 1,
        ]
        return float(np.abs(errors).max())


def plant(
    name: str = SOURCE,
    factors: tuple[float, float, float] = FACTORS,
    num_windows: int = NUM_WINDOWS,
) -> Planted:
    """Plan a preset's windows and time their rows by its costs times `factors`."""
    source = preset(name)
    alpha, beta, seconds_per_cost = factors
    stages = [replace(s, alpha=s.alpha * alpha, beta=s.beta * beta) for s in source.cost.stages]
    cost, topology, windows = CostModel(stages=tuple(stages)), source.topology, []
    for whole in source.windows(num_windows):
        window = whole.select(np.flatnonzero(whole.length <= topology.capacity))
        start = Placement.identity(window.num_layers, window.num_experts, topology.num_ep_ranks)
        options = PlannerOptions(rows="paper")
        plan = make_plan(window, topology, source.cost, start, "base", options)
        q = rank_demand(window.demand, plan.placement)
        dense, expert = row_costs(window.length, q, plan.rows, topology, cost)
        windows.append((window, plan, seconds_per_cost * (dense + expert)))
    return Planted(source=source, cost=cost, seconds_per_cost=seconds_per_cost, windows=windows)


def max_relative_error() -> float:
    """`selfcalibrate.max_rel_error`: the worst of `NUM_SEEDS` draws of noise."""
    planted = plant()
    return max(
        planted.error(refit(planted.observations(NOISE, seed), planted.source.cost))
        for seed in range(NUM_SEEDS)
    )
