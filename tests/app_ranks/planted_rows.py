"""Row times as a machine would show them whose dense stages are slower than configured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from tiny import tiny_config

from app.config import RunConfig
from planner.cost import CostModel, Stage
from planner.policy import schedule
from planner.score import rank_demand, row_costs

SECONDS_PER_COST = 2.0
SLOWER = 3.0
COSTS_SEEN = "alpha-of-every-search.txt"


def calibrating_config() -> RunConfig:
    """Six windows, re-fitted after the fifth; small cells, so that a window has several rows."""
    config = tiny_config()
    return replace(
        config,
        rollout=replace(config.rollout, num_groups=8),
        train=replace(config.train, num_windows=6),
        planner=replace(config.planner, recalibrate_every=5, capacity=48),
        wandb=replace(config.wandb, heatmap_every=2),
    )


def slower_cost() -> CostModel:
    """The configured model with its dense stages `SLOWER` times as dear."""
    stages = [
        Stage(name=s.name, alpha=SLOWER * s.alpha, beta=SLOWER * s.beta)
        for s in calibrating_config().cost.stages
    ]
    return CostModel(stages=tuple(stages))


def planted_rows(step, window, plan, topology) -> np.ndarray:
    """Seconds [row, EDP shard] under `slower_cost`, instead of what the clock says."""
    q = rank_demand(window.demand, plan.placement)
    dense, expert = row_costs(window.length, q, plan.rows, topology, slower_cost())
    return SECONDS_PER_COST * (dense + expert)


def recording_schedule(window, topology, cost, placement, policy, options):
    """The planner's own search, which leaves behind the coefficients it was given."""
    with Path(COSTS_SEEN).open("a") as file:
        file.write(f"{window.window_id} {cost.alpha.sum()}\n")
    return schedule(window, topology, cost, placement, policy, options)
