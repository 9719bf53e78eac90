"""Table 7: the search against OR-Tools CP-SAT on nested prefixes of a few windows (Section 4.3)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from app.results.progress import track
from app.studies.recording import Recording
from app.studies.rescheduling import shared_placement
from app.studies.result import StudyResult, percent
from planner.baselines import solve_cp_sat
from planner.packing.global_rows import global_ffd_rows
from planner.packing.row_count import most_rows, raised_to_pipeline_floor, row_count
from planner.policy import PlannerOptions
from planner.score import rank_demand, score_rank_demand
from planner.search.pair_anneal import pair_anneal
from planner.search.population_annealing import population_annealing
from planner.search.rescore import cells_to_internal, problem_of
from planner.window import Window

SIZES = (32, 64, 128, 256)
NUM_PROFILES = 5
PAPER_PROPOSALS = 1_280_000
"""64 members x 2 levels x 10,000."""


def study_ilp(
    recording: Recording,
    options: PlannerOptions,
    *,
    seconds: float = 10.0,
    sizes: Sequence[int] = SIZES,
) -> StudyResult:
    """Reduction from the common FFD layout; figures `replay.ilp.n<N>.*` are medians over profiles.

    seconds: CP-SAT's limit for each profile and size, presolve included (the paper: 60).
    Raises ImportError without OR-Tools, ValueError when no window has a prefix of any size.
    """
    from ortools.sat.python import cp_model  # noqa: F401  (fail before any work)

    chosen = profiles(recording.windows)
    steps = [
        (size, window)
        for size in sizes
        for window in chosen
        if prefix(window, size, recording) is not None
    ]
    if not steps:
        raise ValueError(
            f"no window has a prefix of {min(sizes)} or more trajectories that fills its rows"
        )
    found: dict[int, list[dict[str, float]]] = {}
    for size, window in track(steps, "ILP"):
        reductions = _compare(window, size, recording, options, seconds)
        found.setdefault(size, []).append(reductions)
    figures: dict[str, float] = {}
    skipped: dict[str, str] = {}
    rows = []
    for size in sizes:
        if size not in found:
            skipped[f"replay.ilp.n{size}"] = "no window has so many trajectories in whole groups"
            continue
        cells = [str(size), str(len(found[size]))]
        for name in ("search", "population_annealing", "cp_sat", "bound"):
            values = [profile[name] for profile in found[size] if name in profile]
            if values:
                figures[f"replay.ilp.n{size}.{name}"] = float(np.median(values))
                cells.append(percent(float(np.median(values))))
            else:
                skipped[f"replay.ilp.n{size}.{name}"] = f"no incumbent within {seconds:g} s"
                cells.append("-")
        rows.append(cells)
    return StudyResult(
        title=f"Table 7. Median reduction from FFD (%), CP-SAT with {seconds:g} s",
        header=("N", "profiles", "search", "population SA", "CP-SAT", "bound"),
        rows=rows,
        figures=figures,
        skipped=skipped,
    )


def profiles(windows: Sequence[Window]) -> list[Window]:
    """At most five windows, evenly spread."""
    picks = np.linspace(0, len(windows) - 1, min(NUM_PROFILES, len(windows))).round().astype(int)
    return [windows[k] for k in picks]


def prefix(window: Window, size: int, recording: Recording) -> Window | None:
    """The first `size` trajectories; None when there are fewer, or they leave a cell empty."""
    if window.num_trajectories < size:
        return None
    part = window.select(np.arange(size))
    topology = recording.topology
    if row_count(part.length, topology).value > most_rows(size, topology):
        return None
    return part


def _compare(
    window: Window, size: int, recording: Recording, options: PlannerOptions, seconds: float
) -> dict[str, float]:
    """Reductions of one profile; `cp_sat` is absent without an incumbent.

    bound: the most that any rows could reduce, by CP-SAT's certificate or by B, the tighter.
    """
    topology, cost = recording.topology, recording.cost
    placement = shared_placement(window, recording, options)
    part = prefix(window, size, recording)
    assert part is not None
    counted = row_count(part.length, topology)
    num_rows = raised_to_pipeline_floor(counted.value, size, topology)
    first = global_ffd_rows(part.length, topology, counted, num_rows)
    q = rank_demand(part.demand, placement)
    scored = score_rank_demand(part.length, q, first, topology, cost)
    before = scored.max_shard
    problem = problem_of(part.length, q, num_rows, topology, cost)
    seeds = [cells_to_internal(first.cell, topology)]
    reductions = {}
    engines = (("search", pair_anneal), ("population_annealing", population_annealing))
    for name, engine in engines:
        best = engine(
            problem,
            seeds,
            seed=options.seed,
            num_threads=options.num_threads,
            budget_seconds=None,
            budget_proposals=PAPER_PROPOSALS,
        )
        reductions[name] = 1 - best.key[0] / before
    solved = solve_cp_sat(
        part.length,
        q,
        first,
        topology,
        cost,
        seconds=seconds,
        num_workers=options.num_threads,
        seed=options.seed,
    )
    if solved.rows is not None:
        after = score_rank_demand(part.length, q, solved.rows, topology, cost).max_shard
        reductions["cp_sat"] = 1 - after / before
    reductions["bound"] = 1 - max(solved.bound, scored.lower_bound) / before
    return reductions
