"""slime's launch scripts: what full and reschedule save against slime's own schedule.

Cluster defaults (`rows: makespan`, `stop: net_benefit`, reroute on slime's rows). Saved is per cent
of the predicted 1F1B time, which counts pipeline bubbles; `joint_saved_*` is per cent of max_g U_g.
The oracle is perfect replication of experts inside each row of full (`planner.baselines`).
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np

from app.bench.result import BenchResult
from app.results.progress import track
from app.studies.recording import Recording, open_recording
from planner.baselines import replica_oracle
from planner.placement import Placement
from planner.plan import Plan
from planner.policies import POLICIES, TRAINED
from planner.policy import PlannerOptions, make_plan
from planner.recorded.presets import PRESET_NAMES
from planner.window import Window

COMPARED_WITH_SLIME = tuple(name for name in TRAINED if POLICIES[name].rows != "dp_local_ffd")
"""All that trains as slime or by a decision of ours; the paper's base is not slime's."""
NUM_WINDOWS = 5
PROPOSALS = 2_000_000
"""Of one search: about a second of two free cores, and the same on a loaded machine."""
QUICK_WINDOWS = 1


def bench_slime(quick: bool) -> BenchResult:
    """Figures `slime.*.<preset>`; residual_vs_oracle: joint cost of full over the oracle's, - 1."""
    figures: dict[str, float] = {}
    names = [name for name in PRESET_NAMES if name.startswith("slime:")]
    for name in track(names, "slime"):
        recording = open_recording(name, num_windows=QUICK_WINDOWS if quick else NUM_WINDOWS)
        found = measure(recording)
        suffix = name.removeprefix("slime:")
        figures |= {f"slime.{key}.{suffix}": value for key, value in found.items()}
    return BenchResult(figures=figures)


def measure(recording: Recording, options: PlannerOptions | None = None) -> dict[str, float]:
    """Means over the windows of one preset; every policy carries its own placement."""
    options = options or PlannerOptions(
        rows="makespan",
        stop="net_benefit",
        rows_from="slime",
        move=recording.move,
        budget_seconds=None,
        budget_proposals=PROPOSALS,
    )
    carried: dict[str, Placement] = dict.fromkeys(COMPARED_WITH_SLIME, recording.identity())
    makespan: dict[str, list[float]] = {policy: [] for policy in COMPARED_WITH_SLIME}
    joint: dict[str, list[float]] = {policy: [] for policy in COMPARED_WITH_SLIME}
    rows: dict[str, list[float]] = {policy: [] for policy in COMPARED_WITH_SLIME}
    balanced, residual = [], []
    for window in recording.windows:
        for policy in COMPARED_WITH_SLIME:
            plan = _plan(recording, carried[policy], policy, options, window)
            carried[policy] = plan.placement
            makespan[policy].append(plan.report["makespan"])
            joint[policy].append(plan.report["joint_cost"])
            rows[policy].append(plan.report["rows"])
        oracle = replica_oracle(window, plan.rows, recording.topology, recording.cost)
        residual.append(plan.report["joint_cost"] / oracle.max_shard - 1)
        with_kk = replace(options, slime_balance_data=True)
        plan = _plan(recording, recording.identity(), "off", with_kk, window)
        balanced.append(plan.report["makespan"])
    time_of = {policy: np.array(values) for policy, values in makespan.items()}
    cost_of = {policy: np.array(values) for policy, values in joint.items()}
    figures = {
        f"saved_{policy}_vs_off": float(100 * (1 - time_of[policy] / time_of["off"]).mean())
        for policy in COMPARED_WITH_SLIME[1:]
    }
    figures["saved_full_vs_off_balanced"] = float(
        100 * (1 - time_of["full"] / np.array(balanced)).mean()
    )
    figures["full_over_reschedule"] = float((time_of["full"] / time_of["reschedule"]).max())
    figures["full_over_reroute"] = float((time_of["full"] / time_of["reroute"]).max())
    for policy in COMPARED_WITH_SLIME[1:]:
        saved = 100 * (1 - cost_of[policy] / cost_of["off"])
        figures[f"joint_saved_{policy}_vs_off"] = float(saved.mean())
    figures["residual_vs_oracle"] = float(np.mean(residual))
    figures["rows_off"] = float(np.mean(rows["off"]))
    figures["rows_full"] = float(np.mean(rows["full"]))
    return figures


def _plan(
    recording: Recording,
    carried: Placement,
    policy: str,
    options: PlannerOptions,
    window: Window,
) -> Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # long trajectories, once for each policy and window
        return make_plan(window, recording.topology, recording.cost, carried, policy, options)
