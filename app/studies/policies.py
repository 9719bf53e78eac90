"""Table 6: what each policy leaves of global and row-local EP excess, and what it saves.

Every policy carries its own placement from window to window, from identity.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from app.results.progress import track
from app.studies.recording import Recording
from app.studies.result import StudyResult, percent
from planner.placement import Placement
from planner.plan import Plan
from planner.policy import PlannerOptions, make_plan, score
from planner.topology import Topology
from planner.window import Window

FIGURES = (
    "rows",
    "global_excess",
    "row_local_excess",
    "moved_experts",
    "joint_saved",
    "makespan_saved",
    "token_utilization",
)
HEADER = (
    "policy",
    "rows",
    "global %",
    "row-local %",
    "experts moved",
    "joint saved %",
    "1F1B saved %",
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Split:
    """Modelled work of one window, summed over rows and shards (Figure 8)."""

    dense_mean: float
    """Dense work if every cell of a row had the mean."""
    dense_gap: float
    """Waiting for the slowest cell."""
    expert_mean: float
    """Expert work if every rank had the mean."""
    expert_gap: float
    """Waiting for the busiest rank."""
    joint: float
    """max_g U_g."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PolicyStudy:
    """The study's result and what its figures are drawn from."""

    result: StudyResult
    splits: dict[str, list[Split]]
    """By policy, one for each window."""
    last_plan: dict[str, Plan]
    """By policy, of the last window."""


def study_policies(
    recording: Recording, options: PlannerOptions, policies: Sequence[str]
) -> PolicyStudy:
    """Plan every window under every policy; figures `replay.<policy>.*` are means over windows.

    joint_saved and makespan_saved are per cent of the base policy's modelled joint cost and of its
    predicted 1F1B time. Raises ValueError when a window cannot be planned.
    """
    base = _base_makespans(recording, options)
    figures: dict[str, float] = {}
    rows = []
    splits: dict[str, list[Split]] = {}
    plans: dict[str, Plan] = {}
    said: set[str] = set()
    steps = [(policy, k) for policy in policies for k in range(len(recording.windows))]
    reports: dict[str, list[dict[str, float]]] = {policy: [] for policy in policies}
    for policy, k in track(steps, "policies"):
        window = recording.windows[k]
        carried = plans[policy].placement if policy in plans else recording.identity()
        plan = _plan(recording, window, carried, policy, options, said)
        plans[policy] = plan
        splits.setdefault(policy, []).append(split_of(recording, window, plan))
        reports[policy].append(_with_savings(plan.report, base[k]))
    for policy in policies:
        values = {name: float(np.mean([r[name] for r in reports[policy]])) for name in FIGURES}
        figures |= {f"replay.{policy}.{name}": value for name, value in values.items()}
        rows.append(
            [
                policy,
                f"{values['rows']:.2f}",
                percent(values["global_excess"]),
                percent(values["row_local_excess"]),
                f"{values['moved_experts']:.0f}",
                f"{values['joint_saved']:.2f}",
                f"{values['makespan_saved']:.2f}",
            ]
        )
    result = StudyResult(
        title="Table 6. Policies: EP excess and modelled cost saved against base (window means)",
        header=HEADER,
        rows=rows,
        figures=figures,
    )
    return PolicyStudy(result=result, splits=splits, last_plan=plans)


def _with_savings(report: dict[str, float], base_makespan: float) -> dict[str, float]:
    joint_saved = 1 - report["joint_cost"] / report["base_joint_cost"]
    makespan_saved = 1 - report["makespan"] / base_makespan
    return {**report, "joint_saved": 100 * joint_saved, "makespan_saved": 100 * makespan_saved}


def _base_makespans(recording: Recording, options: PlannerOptions) -> list[float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            make_plan(
                window, recording.topology, recording.cost, recording.identity(), "base", options
            ).report["makespan"]
            for window in recording.windows
        ]


def _plan(
    recording: Recording,
    window: Window,
    carried: Placement,
    policy: str,
    options: PlannerOptions,
    said: set[str],
) -> Plan:
    """One plan; each warning is printed once for each window."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = make_plan(window, recording.topology, recording.cost, carried, policy, options)
    for warning in caught:
        text = f"window {window.window_id}: {warning.message}"
        if text not in said:
            said.add(text)
            print(text)
    return plan


def split_of(recording: Recording, window: Window, plan: Plan) -> Split:
    """Splits a plan's modelled work into what balance would leave and what waiting adds."""
    topology = recording.topology
    figures = score(window, plan.rows, topology, recording.cost, plan.placement)
    dense_mean, expert_mean = balanced_work(window, plan.rows.kept, topology, recording)
    return Split(
        dense_mean=dense_mean,
        dense_gap=figures.dense - dense_mean,
        expert_mean=expert_mean,
        expert_gap=figures.expert - expert_mean,
        joint=figures.max_shard,
    )


def balanced_work(
    window: Window, kept: np.ndarray, topology: Topology, recording: Recording
) -> tuple[float, float]:
    """(dense, expert) work of the kept trajectories, perfectly spread, summed over shards."""
    work = recording.cost.dense_work(window.length[kept], topology.capacity).sum()
    dense = float(work) * topology.num_shards / topology.num_dp_slots
    routed = int(window.routed_rows[kept].sum()) * window.top_k * window.num_layers
    if window.estimated.any():
        routed = int(window.demand[kept].sum(dtype=np.int64))
    unit = topology.capacity * topology.ep_groups_per_shard
    return dense, routed / topology.num_ep_ranks / unit
