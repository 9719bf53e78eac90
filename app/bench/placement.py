"""Placement: speed against EPLB in plain Python, hits of the CV target, experts moved.

20 windows carried forward, 19 transitions. Both planners get the same ready loads, in turn; the
ratio is of medians of one run, in CPU time of the one thread, so that other load does not stretch
the longer of the two. Greedy is timed from loads to owners and swaps (what a commit
executes); `place_speedup_vs_eplb` times the whole `place` call, with slots, prices and certificate.
"""

from __future__ import annotations

import time

import numpy as np

from app.bench.result import PAPER_PRESETS, BenchResult
from app.results.progress import track
from app.studies.placement import hit_share
from app.studies.recording import Recording, open_recording
from planner.baselines import eplb
from planner.placement import Placement
from planner.placing.greedy import greedy_repair
from planner.policy import PlannerOptions, place

REPEATS = 3
CALLS = 10
"""Calls of the greedy repair in one sample: a single one is too short to time."""


def bench_placement(quick: bool) -> BenchResult:
    """Figures `placement.*.{tiny,flash}`."""
    figures: dict[str, float] = {}
    for suffix, source in PAPER_PRESETS.items():
        recording = open_recording(source, num_windows=5 if quick else 20)
        found = measure(recording, f"placement {suffix}")
        figures |= {f"placement.{name}.{suffix}": value for name, value in found.items()}
    return BenchResult(figures=figures)


def measure(recording: Recording, title: str) -> dict[str, float]:
    """Carry greedy, few_moves and EPLB R0 through the windows."""
    topology = recording.topology
    options = {
        kind: PlannerOptions(rows="paper", stop="cv", placement=kind)
        for kind in ("greedy", "few_moves")
    }
    target = options["greedy"].cv_target
    carried: dict[str, Placement] = dict.fromkeys(options, recording.identity())
    moved: dict[str, list[int]] = {kind: [] for kind in options}
    hits: dict[str, list[float]] = {kind: [] for kind in options}
    seconds: dict[str, list[float]] = {
        "repair": [],
        "greedy": [],
        "few_moves": [],
        "eplb": [],
    }
    for k, window in enumerate(track(recording.windows, title)):
        load = window.expert_load
        owner = carried["greedy"].owner.astype(np.int64)
        took: dict[str, list[float]] = {name: [] for name in seconds}
        for _ in range(REPEATS):
            start = time.thread_time()
            for _ in range(CALLS):
                greedy_repair(load, owner, topology.num_ep_ranks, target)
            took["repair"].append((time.thread_time() - start) / CALLS)
            start = time.thread_time()
            eplb(load, topology.num_ep_ranks, compiled=False)
            took["eplb"].append(time.thread_time() - start)
            for kind, chosen in options.items():
                start = time.thread_time()
                result = place(window, topology, carried[kind], "full", chosen)
                took[kind].append(time.thread_time() - start)
                placed = result.placement
                if len(took[kind]) == REPEATS:
                    if k:  # the cold start is not a transition
                        moved[kind].append(placed.num_moved(carried[kind]))
                        hits[kind].append(hit_share(window, placed, target))
                    carried[kind] = placed
        if k:
            for name, values in took.items():
                seconds[name].append(float(np.median(values)))
    median = {name: float(np.median(values)) for name, values in seconds.items()}
    return {
        "greedy_speedup_vs_eplb": median["eplb"] / median["repair"],
        "place_speedup_vs_eplb": median["eplb"] / median["greedy"],
        "few_moves_speedup_vs_eplb": median["eplb"] / median["few_moves"],
        "cv_hit": float(np.mean(hits["greedy"])),
        "few_moves_cv_hit": float(np.mean(hits["few_moves"])),
        "few_moves_ratio": float(np.sum(moved["few_moves"]) / np.sum(moved["greedy"])),
        "greedy_moves": float(np.mean(moved["greedy"])),
    }
