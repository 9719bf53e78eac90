"""Plan the windows under every policy and at neighbouring sizes, and judge what it is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from app.advise.costs import JobCosts
from app.advise.study import PolicyResult, identity, planner_options, study, warm_up
from app.advise.verdict import Worth, answer, worth
from app.results.progress import track
from planner.placement import rank_load
from planner.policies import FULL_OVER_OFF
from planner.policy import PlannerOptions
from planner.topology import Topology
from planner.window import Window

SHORTEST_SEARCH, LONGEST_SEARCH = 0.05, 1.0
"""Seconds of a search: its start alone takes a few hundredths and finds most of the gain."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Advice:
    """Everything that was found for one job."""

    results: Mapping[str, PolicyResult]
    worths: Mapping[str, Worth]
    line: str
    imbalance: float
    neighbours: Sequence[dict[str, Any]]
    costs: JobCosts
    seconds_per_cost: float | None


def judge(
    windows: Sequence[Window],
    topology: Topology,
    costs: JobCosts,
    window_seconds: float | None,
    state_seconds: float,
    budget: float | None,
    num_threads: int,
    seed: int,
) -> tuple[Advice, list[str]]:
    """Plan every policy and the neighbours; returns the advice and the planner's warnings.

    The measured window time, where given, fixes what a unit of cost takes. Without a budget the
    search gets 1% of a window's training time, and what state loading hides.
    """
    model, unit = costs.cost, costs.seconds_per_cost()
    plain = planner_options(None, SHORTEST_SEARCH, num_threads, seed)
    warm_up(windows[0], topology, model, plain)
    off, _ = study(windows, topology, model, plain, ("off",), shown=False)
    if window_seconds is not None:
        unit = window_seconds / off["off"].makespan
    if budget is None:
        fair = 0.01 * (unit or 0.0) * off["off"].makespan + state_seconds
        budget = min(max(fair, SHORTEST_SEARCH), LONGEST_SEARCH)
    move = costs.move(unit)
    options = planner_options(move, budget, num_threads, seed)
    results, said = study(windows, topology, model, options)
    worths = {
        policy: worth(
            result,
            results["off"],
            seconds_per_cost=unit,
            moves_known=move is not None,
            state_seconds=state_seconds,
        )
        for policy, result in results.items()
    }
    loads = [rank_load(w.expert_load, identity(w, topology)) for w in windows]
    imbalance = float(np.mean([(x.max(axis=1) / x.mean(axis=1)).mean() for x in loads]))
    is_assumed = window_seconds is None and costs.from_file is None and unit is not None
    advice = Advice(
        results=results,
        worths=worths,
        line=answer(worths, imbalance, is_assumed),
        imbalance=imbalance,
        neighbours=_neighbours(windows[0], costs, results["off"].plans[0].report, options),
        costs=costs,
        seconds_per_cost=unit,
    )
    return advice, said


def _neighbours(
    window: Window, costs: JobCosts, yours: Mapping[str, float], options: PlannerOptions
) -> list[dict[str, Any]]:
    """Time of off and full at each neighbouring size that fits, over yours under off."""
    base = yours["makespan"] * costs.size.capacity
    quick = replace(options, budget_seconds=min(0.2, options.budget_seconds), stop="cv")
    found = []
    for choice, size in track(list(costs.size.neighbours()), "neighbours"):
        try:
            topology = size.topology(window.num_experts)
            results, _ = study(
                [window], topology, costs.at(size), quick, FULL_OVER_OFF, shown=False
            )
        except ValueError:
            continue
        dropped = int(results["full"].mean("dropped"))
        times = {
            policy: result.makespan * size.capacity / base for policy, result in results.items()
        }
        note = f"{dropped} trajectories dropped: too few for DP {size.dp}" if dropped else ""
        found.append({"choice": choice, **times, "note": note})
    return found


def advice_figures(advice: Advice) -> tuple[dict[str, float], dict[str, str]]:
    """Figures `advise.*` and what could not be said, with the reason."""
    figures = {"advise.rank_max_over_mean": advice.imbalance}
    skipped: dict[str, str] = {}
    moved = advice.costs.bytes_per_expert()
    for policy, result in advice.results.items():
        name, found = f"advise.{policy}", advice.worths[policy]
        figures[f"{name}.rows"] = result.mean("rows")
        figures[f"{name}.global_excess"] = result.mean("global_excess")
        figures[f"{name}.row_local_excess"] = result.mean("row_local_excess")
        if policy == "off":
            continue
        figures[f"{name}.saved"] = found.saved
        figures[f"{name}.moved_experts"] = result.mean("moved_experts")
        if moved is None:
            skipped[f"{name}.moved_mb"] = "bytes of an expert unknown: give move.bytes_per_expert"
        else:
            figures[f"{name}.moved_mb"] = result.mean("moved_experts") * moved / 2**20
        if found.net is None:
            skipped[f"{name}.net_seconds"] = (
                "speed or bytes unknown: give --window-seconds and move.bytes_per_expert in --cost"
            )
        else:
            figures[f"{name}.exposed_seconds"] = found.exposed
            figures[f"{name}.saved_seconds"] = found.seconds
            figures[f"{name}.net_seconds"] = found.net
    for neighbour in advice.neighbours:
        choice = neighbour["choice"].replace(" ", "").replace(",", "_").lower()
        figures[f"advise.neighbour.{choice}.full"] = neighbour["full"]
    figures["advise.answer_yes"] = float(advice.line.startswith("Yes"))
    return figures, skipped
