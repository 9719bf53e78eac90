"""Table 21 and Figure 14: schedules under one shared placement for each window (Appendix K)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from app.results.progress import track
from app.studies.recording import Recording
from app.studies.result import StudyResult
from planner.baselines import nemo_rl_rows, verl_rows
from planner.packing.base_rows import dp_local_ffd
from planner.packing.global_rows import global_ffd_rows
from planner.packing.row_count import count_kept, raised_to_pipeline_floor
from planner.packing.slime_rows import slime_rows
from planner.placement import Placement
from planner.policy import PlannerOptions, place, schedule
from planner.rows import Rows
from planner.score import Score, rank_demand, score_rank_demand
from planner.window import Window

SCHEDULES = {
    "base": "Base (DP-local FFD)",
    "global_ffd": "Global FFD",
    "slime": "slime's schedule",
    "slime_balanced": "slime, --balance-data",
    "verl": "verl (Karmarkar-Karp)",
    "nemo_rl": "NeMo-RL (modified FFD)",
    "routepack": "RoutePack",
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReschedulingStudy:
    """The study's result and, by schedule, the joint cost of each window over base's."""

    result: StudyResult
    joint: dict[str, np.ndarray]


def executable(window: Window, recording: Recording) -> Window:
    """The window without the trailing groups that cannot be run without an empty cell."""
    kept, _ = count_kept(window.length, window.group, recording.topology)
    return window if kept == window.num_trajectories else window.select(np.arange(kept))


def shared_placement(
    window: Window, recording: Recording, options: PlannerOptions, policy: str = "full"
) -> Placement:
    """The placement all schedules share: greedy from identity to the CV target."""
    paper = replace(options, placement="greedy", stop="cv", max_moves=None, max_mb=None)
    return place(window, recording.topology, recording.identity(), policy, paper).placement


def fixed_schedules(
    window: Window, recording: Recording, options: PlannerOptions
) -> dict[str, Rows | None]:
    """Rows that do not look at routing, by name; None where a schedule leaves a cell empty."""
    length, topology = window.length, recording.topology
    _, counted = count_kept(length, window.group, topology)
    num_rows = raised_to_pipeline_floor(counted.value, len(length), topology)
    work = recording.cost.dense_work(length, topology.capacity) if recording.cost.stages else None
    return {
        "base": dp_local_ffd(
            length,
            window.window_id,
            topology,
            shard_size=options.shard_size,
            pipeline_floor=True,
        ),
        "global_ffd": global_ffd_rows(length, topology, counted, num_rows),
        "slime": slime_rows(length, topology),
        "slime_balanced": slime_rows(length, topology, balance_data=True, workload=work),
        "verl": verl_rows(length, topology),
        "nemo_rl": nemo_rl_rows(length, topology),
    }


def score_schedules(
    window: Window, recording: Recording, options: PlannerOptions
) -> dict[str, tuple[Rows, Score]]:
    """Every schedule of one executable window under the shared placement, scored."""
    placement = shared_placement(window, recording, options)
    q = rank_demand(window.demand, placement)
    found: dict[str, Rows | None] = fixed_schedules(window, recording, options)
    paper = replace(options, rows="paper")
    found["routepack"] = schedule(
        window, recording.topology, recording.cost, placement, "full", paper
    ).rows
    return {
        name: (
            rows,
            score_rank_demand(window.length, q, rows, recording.topology, recording.cost),
        )
        for name, rows in found.items()
        if rows is not None
    }


def study_rescheduling(recording: Recording, options: PlannerOptions) -> ReschedulingStudy:
    """Score all schedules; figures `replay.rescheduling.<schedule>.*` are means over windows.

    ep, dense and joint are costs over base's of the same window (base = 1); saved_vs_base and its
    range, and saved_vs_global_ffd, are percentage points.
    """
    scored = []
    for window in track(recording.windows, "rescheduling"):
        scored.append(score_schedules(executable(window, recording), recording, options))
    figures: dict[str, float] = {}
    skipped: dict[str, str] = {}
    rows = []
    joint: dict[str, np.ndarray] = {}
    for name, label in SCHEDULES.items():
        if any(name not in found or "base" not in found for found in scored):
            skipped[f"replay.rescheduling.{name}"] = (
                "some window has too few trajectories for rows of this schedule or of base without "
                "an empty cell"
            )
            continue
        values = _means(scored, name)
        joint[name] = np.array([f[name][1].max_shard / f["base"][1].max_shard for f in scored])
        saved = 100 * (1 - joint[name])
        values |= {
            "saved_vs_base": float(saved.mean()),
            "saved_vs_base_min": float(saved.min()),
            "saved_vs_base_max": float(saved.max()),
        }
        figures |= {f"replay.rescheduling.{name}.{key}": value for key, value in values.items()}
        rows.append(
            [
                label,
                f"{values['rows']:.2f}",
                f"{100 * values['utilization']:.2f}",
                *(f"{100 * values[key]:.2f}" for key in ("ep", "dense", "joint")),
                f"{100 * joint[name].min():.2f}-{100 * joint[name].max():.2f}",
            ]
        )
    if "routepack" in joint and "global_ffd" in joint:
        saved = 100 * (1 - joint["routepack"] / joint["global_ffd"])
        figures["replay.rescheduling.routepack.saved_vs_global_ffd"] = float(saved.mean())
    result = StudyResult(
        title="Table 21. Schedules under one placement for each window (costs: base = 100)",
        header=("schedule", "rows", "util. %", "EP", "dense", "joint", "joint range"),
        rows=rows,
        figures=figures,
        skipped=skipped,
    )
    return ReschedulingStudy(result=result, joint=joint)


def _means(scored: Sequence[dict[str, tuple[Rows, Score]]], name: str) -> dict[str, float]:
    def mean(value) -> float:  # type: ignore[no-untyped-def]
        return float(np.mean([value(found[name], found["base"]) for found in scored]))

    return {
        "rows": mean(lambda one, base: one[0].num_rows),
        "utilization": mean(lambda one, base: one[1].token_utilization),
        "ep": mean(lambda one, base: one[1].expert / base[1].expert),
        "dense": mean(lambda one, base: _ratio(one[1].dense, base[1].dense)),
        "joint": mean(lambda one, base: one[1].max_shard / base[1].max_shard),
    }


def _ratio(value: float, base: float) -> float:
    """value / base, 1 where a cost model without stages leaves both at 0."""
    return value / base if base else 1.0
