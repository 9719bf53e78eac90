"""`routepack advise`: imbalance found, savings predicted, neighbours tried, one line of advice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from app.advise.costs import BYTES_PER_SECOND, FLOPS_PER_SECOND, JobCosts, job_costs
from app.advise.job import JobSize
from app.advise.study import PolicyResult, identity, planner_options, study, warm_up
from app.advise.verdict import CANDIDATES, Worth, answer, worth
from app.report.write import write_page
from app.results.figures import write_figures
from app.results.plan_details import rank_load_detail, rows_detail
from app.results.progress import print_table, track
from planner.placement import rank_load
from planner.policy import PlannerOptions
from planner.recorded import preset, read
from planner.recorded.presets import PRESET_NAMES
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


def advise(
    source: str,
    size: JobSize,
    *,
    cost: str | None,
    window_seconds: float | None,
    state_seconds: float,
    num_windows: int,
    num_trajectories: int | None,
    missing: str,
    num_steps: int,
    num_experts: int | None,
    moe_layers: tuple[int, ...] | None,
    budget: float | None,
    num_threads: int,
    seed: int,
    output: Path,
    json_file: str | None,
) -> dict[str, float]:
    """Read, plan, judge; print tables and the line, write the page and the JSON.

    Raises ValueError naming the flag or file that is wrong.
    """
    if output.suffix not in (".html", ".htm"):
        raise ValueError(f"--output: got {output}, expected a name that ends in .html")
    is_preset = source.startswith(("synthetic:", "slime:"))
    size = size.completed(source, preset(source).topology if is_preset else None)
    if cost in PRESET_NAMES:  # what a dump does not say, the model named by --cost does
        num_experts = num_experts or preset(cost).corpus.num_experts
        moe_layers = moe_layers or preset(cost).layer_numbers
    try:
        windows = read(
            source,
            num_windows=num_windows,
            num_trajectories=num_trajectories,
            num_experts=num_experts,
            moe_layers=moe_layers,
            missing=missing,
            num_steps=num_steps,
            pp=size.pp,
            ranks_per_slot=size.ranks_of_slot,
        )
    except ValueError as error:
        if num_experts is None and "num_experts" in str(error):
            help_text = "give --num-experts, or --cost with the preset of your model"
            raise ValueError(f"{error}: {help_text}") from error
        raise
    topology = size.topology(windows[0].num_experts)
    costs = job_costs(source, cost, windows[0], size)
    num_trajectories = windows[0].num_trajectories
    print(f"{source}: {len(windows)} windows of {num_trajectories} trajectories; {size.words}")
    found, said = judge(
        windows, topology, costs, window_seconds, state_seconds, budget, num_threads, seed
    )
    for text in said:
        print(f"note: {text}")
    figures, skipped = advice_figures(found)
    details = _details(found, source, windows, topology, size, window_seconds, state_seconds)
    content = {"command": "advise", "figures": figures, "skipped": skipped, "details": details}
    write_page(content, output, source)
    write_figures(json_file, "advise", figures, skipped, details)
    _print(details, found, output)
    return figures


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
                [window], topology, costs.at(size), quick, ("off", "full"), shown=False
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


def _details(
    advice: Advice,
    source: str,
    windows: Sequence[Window],
    topology: Topology,
    size: JobSize,
    window_seconds: float | None,
    state_seconds: float,
) -> dict[str, Any]:
    policies = {}
    for policy, result in advice.results.items():
        found = advice.worths[policy]
        policies[policy] = {"saved": found.saved, "table": _row(policy, result, found, advice)}
        if found.net is not None:
            policies[policy]["net_seconds"] = found.net
    full = advice.results["full"].plans[-1]
    last = windows[-1]
    return {
        "source": source,
        "job": f"{source}, {len(windows)} windows; {size.words}.",
        "answer": advice.line,
        "policies": policies,
        "neighbours": list(advice.neighbours),
        "assumptions": _assumptions(advice, window_seconds, state_seconds),
        "rank_load": rank_load_detail(last, identity(last, topology), full.placement),
        "rows": {
            policy: rows_detail(advice.results[policy].plans[-1], last, topology, advice.costs.cost)
            for policy in ("off", "full")
        },
    }


def _row(policy: str, result: PolicyResult, found: Worth, advice: Advice) -> dict[str, str]:
    moved = advice.costs.bytes_per_expert()
    experts = result.mean("moved_experts")
    unknown = "-" if policy == "off" else "?"
    return {
        "rows": f"{result.mean('rows'):.1f}",
        "global excess": f"{result.mean('global_excess'):.1%}",
        "row-local excess": f"{result.mean('row_local_excess'):.1%}",
        "saved": "-" if policy == "off" else f"{found.saved:.1%}",
        "experts moved": f"{experts:.0f}",
        "MB moved": "?" if moved is None and experts else f"{experts * (moved or 0) / 2**20:,.0f}",
        "exposed s": unknown if found.exposed is None else f"{found.exposed:.2f}",
        "net s": unknown if found.net is None else f"{found.net:+.2f}",
    }


def _assumptions(
    advice: Advice, window_seconds: float | None, state_seconds: float
) -> list[list[str]]:
    costs, unit = advice.costs, advice.seconds_per_cost
    kind = "--cost file" if costs.from_file is not None else "FLOPs of the model's shape"
    rows = [["dense-side costs", costs.model, kind]]
    if unit is None:
        rows.append(["speed", "unknown", "give --window-seconds"])
    elif window_seconds is not None:
        rows.append(["speed", f"{window_seconds:g} s per window under off", "--window-seconds"])
    elif costs.from_file is not None:
        rows.append(["speed", f"{1e3 * unit:.3g} ms per unit of cost", "--cost file"])
    else:
        rows.append(["speed", f"{FLOPS_PER_SECOND / 1e12:.0f} TFLOP/s per GPU", "assumed"])
    moved = costs.bytes_per_expert()
    if moved is not None:
        rows.append(["bytes of an expert", f"{moved / 2**20:.1f} MB", "bf16 + fp32 Adam state"])
        given = costs.from_file is not None and costs.from_file.seconds_per_byte
        rate = "--cost file" if given else f"{BYTES_PER_SECOND / 1e9:.0f} GB/s per EP rank"
        rows.append(["moves", rate, "given" if given else "assumed"])
    rows.append(["state loading that hides the search", f"{state_seconds:g} s", "--state-seconds"])
    return rows


def _print(details: Mapping[str, Any], advice: Advice, output: Path) -> None:
    tables = {policy: row["table"] for policy, row in details["policies"].items()}
    header = ("policy", *next(iter(tables.values())))
    rows = [[policy, *row.values()] for policy, row in tables.items()]
    print_table("Modelled, against slime's own schedule (window means)", header, rows)
    if advice.neighbours:
        rows = [
            [n["choice"], f"{n['off']:.3f}", f"{n['full']:.3f}", n["note"]]
            for n in advice.neighbours
        ]
        title = "Neighbours, time over yours"
        print_table(title, ("choice", "off", "full", "note"), rows)
    best = max(CANDIDATES, key=lambda name: advice.worths[name].decisive)
    print(advice.line)
    if advice.line.startswith("No"):
        print(f"page: {output}")
    else:
        print(f"page: {output}; next: run with policy observe, compare its log, then {best}")
