"""Plan the windows under every policy and compare modelled time with slime's own schedule."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from app.results.progress import track
from planner.cost import CostModel
from planner.move_cost import MoveCost
from planner.placement import Placement
from planner.plan import Plan
from planner.policies import TRAINED
from planner.policy import PlannerOptions, make_plan
from planner.topology import Topology
from planner.window import Window


@dataclass(slots=True)
class PolicyResult:
    """A policy's plans, one for each window, in order; each starts from the one before."""

    plans: list[Plan] = field(default_factory=list)

    def mean(self, name: str) -> float:
        """Mean of a figure of the plans' reports."""
        return float(np.mean([plan.report[name] for plan in self.plans]))

    @property
    def makespan(self) -> float:
        """Modelled 1F1B time of the training region, mean over windows, in units of cost."""
        return self.mean("makespan")


def identity(window: Window, topology: Topology) -> Placement:
    """Where training starts."""
    return Placement.identity(window.num_layers, window.num_experts, topology.num_ep_ranks)


def study(
    windows: Sequence[Window],
    topology: Topology,
    cost: CostModel,
    options: PlannerOptions,
    policies: Sequence[str] = TRAINED,
    shown: bool = True,
) -> tuple[dict[str, PolicyResult], list[str]]:
    """(result by policy, warnings). Raises ValueError when a window cannot be planned."""
    results = {policy: PolicyResult() for policy in policies}
    steps = [(policy, window) for policy in policies for window in windows]
    said: dict[str, None] = {}
    for policy, window in track(steps, "advise", shown):
        plans = results[policy].plans
        carried = plans[-1].placement if plans else identity(window, topology)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plans.append(make_plan(window, topology, cost, carried, policy, options))
        said |= {f"window {window.window_id}: {warning.message}": None for warning in caught}
    return results, list(said)


def warm_up(window: Window, topology: Topology, cost: CostModel, options: PlannerOptions) -> None:
    """Plan once unseen, so that just-in-time compilation is not timed as planning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for policy in TRAINED:
            make_plan(window, topology, cost, identity(window, topology), policy, options)


def planner_options(
    move: MoveCost | None, budget: float, num_threads: int, seed: int
) -> PlannerOptions:
    """The cluster's defaults; without known move costs placement stops at the CV target."""
    return PlannerOptions(
        rows="makespan",
        rows_from="slime",
        stop="cv" if move is None else "net_benefit",
        move=move or MoveCost(),
        budget_seconds=budget,
        num_threads=num_threads,
        seed=seed,
    )
