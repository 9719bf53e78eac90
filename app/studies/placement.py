"""Table 5: continuous placement, RoutePack's repairs against EPLB with and without replicas."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from app.results.progress import track
from app.studies.recording import Recording
from app.studies.result import StudyResult, percent
from planner.baselines import EplbPlan, eplb
from planner.placement import Placement, coefficient_of_variation, rank_load
from planner.policy import PlannerOptions, place
from planner.window import Window

REPLICAS = (0, 2, 4, 8)
_TOLERANCE = 1e-12


@dataclass(slots=True)
class CarriedMapping:
    """One planner that carries its own mapping from window to window."""

    label: str
    plan: Callable[[Window, Placement | EplbPlan | None], Placement | EplbPlan]
    mapping: Placement | EplbPlan | None = None
    hits: list[float] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)
    churn: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def step(self, window: Window, cv_target: float) -> None:
        """Plan one window; the cold start is carried on but not counted."""
        start = time.perf_counter()
        mapping = self.plan(window, self.mapping)
        seconds = time.perf_counter() - start
        if self.mapping is not None:
            moved = mapping.num_moved(self.mapping)  # type: ignore[arg-type]
            self.hits.append(float(hit_share(window, mapping, cv_target)))
            self.moved.append(moved)
            self.churn.append(moved / mapping.expert_of_slot.size)
            self.seconds.append(seconds)
        self.mapping = mapping


def hit_share(window: Window, mapping: Placement | EplbPlan, cv_target: float) -> float:
    """Share of the layers whose rank-load CV meets the target."""
    load = window.expert_load
    if isinstance(mapping, Placement):
        by_rank = rank_load(load, mapping)
    else:
        by_rank = mapping.rank_load(load)
    return float((coefficient_of_variation(by_rank) <= cv_target + _TOLERANCE).mean())


def planners(recording: Recording, options: PlannerOptions) -> dict[str, CarriedMapping]:
    """The planners of Table 5 by figure name; EPLB is plain Python, as its peer is."""
    topology = recording.topology
    identity = recording.identity()

    def repair(kind: str) -> Callable[..., Placement]:
        chosen = replace(options, placement=kind)

        def plan(window: Window, before: Placement | None) -> Placement:
            return place(window, topology, before or identity, "full", chosen).placement

        return plan

    def rebuild(extra: int) -> Callable[..., EplbPlan]:
        def plan(window: Window, before: EplbPlan | None) -> EplbPlan:
            load = window.expert_load
            return eplb(load, topology.num_ep_ranks, replicas_per_rank=extra, compiled=False)

        return plan

    found = {
        "greedy": CarriedMapping("RoutePack incremental (greedy)", repair("greedy")),
        "few_moves": CarriedMapping("RoutePack few moves", repair("few_moves")),
    }
    for extra in REPLICAS:
        share = extra * topology.num_ep_ranks / recording.windows[0].num_experts
        label = "EPLB R0" if extra == 0 else f"EPLB R{extra} (+{100 * share:.1f}%)"
        found[f"eplb_r{extra}"] = CarriedMapping(label, rebuild(extra))
    return found


def study_placement(recording: Recording, options: PlannerOptions) -> StudyResult:
    """Carry each planner through the windows; figures `replay.placement.<planner>.*`.

    hit and churn are fractions, moved is a mean per transition (logical experts, or physical slots
    rewritten with replicas), p50_seconds spans loads to an executable mapping, warm and
    interleaved. Raises ValueError for a single window: there is no transition.
    """
    if len(recording.windows) < 2:
        raise ValueError("one window has no transition; record two or more")
    carried = planners(recording, options)
    for window in track(recording.windows, "placement"):
        for planner in carried.values():
            planner.step(window, options.cv_target)
    figures: dict[str, float] = {}
    rows = []
    for name, planner in carried.items():
        median = float(np.median(planner.seconds))
        values = {
            "hit": float(np.mean(planner.hits)),
            "moved": float(np.mean(planner.moved)),
            "churn": float(np.mean(planner.churn)),
            "p50_seconds": median,
        }
        figures |= {f"replay.placement.{name}.{key}": value for key, value in values.items()}
        rows.append(
            [
                planner.label,
                percent(values["hit"]),
                f"{values['moved']:,.0f}",
                percent(values["churn"]),
                f"{1e3 * median:.2f}",
            ]
        )
    steps = len(recording.windows) - 1
    return StudyResult(
        title=f"Table 5. Continuous placement, {steps} transitions, CV target {options.cv_target}",
        header=("planner", "hit %", "move", "churn %", "P50 ms"),
        rows=rows,
        figures=figures,
    )
