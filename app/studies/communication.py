"""Table 11: endpoint imbalance of assignments, and DeepEP's deduplicated copies (Section 6.1).

Three layouts at base's number of rows, so that the number of collectives does not change.
"""

from __future__ import annotations

import numpy as np

from app.results.progress import track
from app.studies.recording import Recording
from app.studies.rescheduling import executable, shared_placement
from app.studies.result import StudyResult
from app.studies.token_routing import TokenRouting, read_token_routing
from planner.communication import Traffic, fan_out, traffic
from planner.packing.base_rows import dp_local_ffd
from planner.packing.global_rows import global_ffd_rows
from planner.packing.row_count import row_count
from planner.placement import Placement
from planner.policies import COMPARED, POLICIES
from planner.policy import PlannerOptions
from planner.rows import Rows
from planner.score import rank_demand
from planner.search.pair_anneal import pair_anneal
from planner.search.rescore import cells_to_internal, problem_of, rows_of
from planner.window import Window

LAYOUTS = {name: name.title() for name in COMPARED if name != "off"} | {"base": "Baseline"}
"""The rows of Table 11: layout and its label."""
NO_TOKENS = "the source holds counts only; give token-level routing with --tokens FILE"


def study_communication(
    recording: Recording, options: PlannerOptions, tokens: str | None = None
) -> StudyResult:
    """Figures `replay.communication.<layout>.*`: rho_excess, and with `tokens` the copies' figures.

    rho_excess is rho - 1 of Equation 19, from window means of numerator and denominator.
    copies_remote and copies_peak are changes relative to base, copies_efficiency is 1 / rho, all of
    deduplicated copies over the trajectories whose token-level routing is known (first window).
    Raises ValueError when base has no rows, or `tokens` does not belong to the source.
    """
    known = None
    if tokens is not None:
        known = read_token_routing(tokens, recording.windows[0])
    assigned: dict[str, list[Traffic]] = {layout: [] for layout in LAYOUTS}
    for window in track(recording.windows, "communication"):
        window = executable(window, recording)
        for layout, (placement, rows) in layouts(window, recording, options).items():
            q = rank_demand(window.demand, placement)
            assigned[layout].append(traffic(q, rows, recording.topology))
    figures: dict[str, float] = {}
    for layout, found in assigned.items():
        peak = sum(one.peak for one in found)
        remote = sum(one.remote for one in found)
        rho = recording.topology.num_ep_ranks * peak / remote if remote else 1.0
        figures[f"replay.communication.{layout}.rho_excess"] = rho - 1
    skipped = {}
    if known is None:
        skipped = {f"replay.communication.{layout}.copies": NO_TOKENS for layout in LAYOUTS}
    else:
        figures |= _copies(known, recording, options)
    rows = []
    for layout, label in LAYOUTS.items():
        name = f"replay.communication.{layout}."
        cells = [label, f"{100 * figures[name + 'rho_excess']:.1f}%"]
        for key in ("copies_remote", "copies_peak", "copies_efficiency"):
            sign = "" if key == "copies_efficiency" else "+"
            value = figures.get(name + key)
            cells.append("-" if value is None else f"{100 * value:{sign}.1f}%")
        rows.append(cells)
    return StudyResult(
        title="Table 11. Endpoint imbalance of assignments, and deduplicated copies (vs. baseline)",
        header=("layout", "rho - 1", "remote", "sum of peaks", "efficiency"),
        rows=rows,
        figures=figures,
        skipped=skipped,
    )


def layouts(
    window: Window, recording: Recording, options: PlannerOptions
) -> dict[str, tuple[Placement, Rows]]:
    """Placement and rows of the three layouts, all with base's number of rows."""
    topology = recording.topology
    base = dp_local_ffd(
        window.length,
        window.window_id,
        topology,
        shard_size=options.shard_size,
        pipeline_floor=True,
    )
    if base is None:
        raise ValueError(f"window {window.window_id} has too few trajectories for base rows")
    placement = shared_placement(window, recording, options)
    searched = _rescheduled(window, recording, options, placement, base)
    return {
        layout: (
            placement if POLICIES[layout].places else recording.identity(),
            searched if POLICIES[layout].searches_rows else base,
        )
        for layout in LAYOUTS
    }


def _rescheduled(
    window: Window,
    recording: Recording,
    options: PlannerOptions,
    placement: Placement,
    base: Rows,
) -> Rows:
    """Searched rows, as many as base has."""
    topology = recording.topology
    counted = row_count(window.length, topology)
    first = global_ffd_rows(window.length, topology, counted, base.num_rows)
    q = rank_demand(window.demand, placement)
    problem = problem_of(window.length, q, base.num_rows, topology, recording.cost)
    seeds = [cells_to_internal(rows.cell, topology) for rows in (first, base)]
    found = pair_anneal(
        problem,
        seeds,
        seed=options.seed,
        num_threads=options.num_threads,
        budget_seconds=options.budget_seconds,
        budget_proposals=options.budget_proposals,
    )
    return rows_of(found.cell, problem, topology)


def _copies(known: TokenRouting, recording: Recording, options: PlannerOptions) -> dict[str, float]:
    """Deduplicated copies of the trajectories whose token-level routing is known."""
    window = recording.windows[0].select(known.trajectory)
    kept = executable(window, recording).num_trajectories
    window = window.select(np.arange(kept))
    starts = known.starts[: kept + 1]
    routed = known.routed_experts[: starts[-1]]
    found = {
        layout: traffic(fan_out(routed, starts, placement), rows, recording.topology)
        for layout, (placement, rows) in layouts(window, recording, options).items()
    }
    base = found["base"]
    figures = {}
    for layout, one in found.items():
        name = f"replay.communication.{layout}."
        figures[name + "copies_efficiency"] = one.efficiency
        if layout != "base":
            figures[name + "copies_remote"] = one.remote / base.remote - 1 if base.remote else 0.0
            figures[name + "copies_peak"] = one.peak / base.peak - 1 if base.peak else 0.0
    return figures
