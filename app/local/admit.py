"""Admit one sealed rollout on all ranks: rank 0 plans, everyone commits and gets the same plans.

One placement for the rollout, planned on the demand of all its optimizer steps; every step gets
rows of its own (design.md, Quantities).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from app.config import RunConfig
from app.local.steps import split_steps, step_windows
from app.local.trainer import LocalTrainer
from planner.cost import CostModel
from planner.placement import Placement
from planner.plan import Plan
from planner.window import Window
from rollout_hooks.admission import Admission, Once, PlannerCalls
from train_hooks.commit import CommitReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Admitted:
    """A rollout ready to train, and the seconds of its way there (docs/metrics.md).

    plans, windows, positions: of each optimizer step, the positions within the rollout.
    moved_mb: megabytes (2^20) of expert state that left a rank, over all ranks.
    exposed: seconds that planning, commit and waiting added between sealing and the first row.
    """

    plans: list[Plan]
    windows: list[Window]
    positions: list[np.ndarray]
    commit: CommitReport
    moved_mb: float
    fallback: str | None
    time_place: float
    time_plan: float
    time_state: float
    time_batch_await: float
    overlap: float
    exposed: float

    @property
    def plan(self) -> Plan:
        """The plan of a rollout of one optimizer step, else of the first step."""
        return self.plans[0]


def admit(
    config: RunConfig,
    trainer: LocalTrainer,
    window: Window,
    policy: str,
    calls: PlannerCalls,
    load_state: Callable[[], None] = lambda: None,
    *,
    num_steps: int = 1,
    cost: CostModel | None = None,
) -> Admitted:
    """Place, load state and commit while rows are searched, join; collective over all ranks.

    load_state: brings this rank's state back before the commit; nothing in the embedded trainer,
    which never offloads.
    num_steps: optimizer steps of this rollout. cost: replaces the configured cost model.
    Raises LayoutError when the ranks do not hold the same plan.
    """
    carried = trainer.committer.carried()
    start = time.perf_counter()
    positions = split_steps(window.group, num_steps)
    windows = step_windows(window, positions)
    admissions: list[Admission] = []
    if dist.get_rank() == 0:
        admissions = _open(config, window, windows, policy, calls, carried, cost)
    state_started = time.perf_counter()
    load_state()
    placement: Placement = _from_rank_0(admissions and admissions[0].placement)
    report = trainer.committer.commit(
        placement,
        base_version=carried.version,
        window_id=window.window_id,
        digest=hashlib.sha256(placement.expert_of_slot.tobytes()).hexdigest(),
    )
    state_ended = time.perf_counter()
    joined = [admission.join().to_bytes() for admission in admissions]
    fallback = next((a.fallback for a in admissions if a.fallback), None)
    encoded, fallback = _from_rank_0((joined, fallback))
    plans = [Plan.from_bytes(data) for data in encoded]
    for plan, of_step in zip(plans, windows, strict=True):
        plan.validate(of_step, config.topology, carried)
    ended = time.perf_counter()
    times = dict.fromkeys(("time_place", "time_plan", "overlap"), 0.0)
    if admissions:
        first = admissions[0]
        plan_ended = max(a.schedule_ended_at or ended for a in admissions)
        time_plan = plan_ended - first.schedule_started_at
        hidden = min(plan_ended, state_ended) - max(first.schedule_started_at, state_started)
        times = dict(
            time_place=first.placed_at - first.sealed_at,
            time_plan=time_plan,
            overlap=max(0.0, hidden) / time_plan if time_plan > 0 else 1.0,
        )
    await_seconds = torch.tensor(ended - state_ended)
    dist.all_reduce(await_seconds, op=dist.ReduceOp.MAX)
    bytes_sent = torch.tensor(report.bytes_sent)
    dist.all_reduce(bytes_sent)
    return Admitted(
        plans=plans,
        windows=windows,
        positions=positions,
        commit=report,
        moved_mb=bytes_sent.item() / 2**20,
        fallback=fallback,
        time_state=state_ended - state_started,
        time_batch_await=await_seconds.item(),
        exposed=ended - start,
        **times,
    )


def _open(
    config: RunConfig,
    whole: Window,
    windows: list[Window],
    policy: str,
    calls: PlannerCalls,
    carried: Placement,
    cost: CostModel | None,
) -> list[Admission]:
    """Place once, on the whole rollout, and start every step's row search."""
    place_whole = Once(lambda of_step, *arguments: calls.place(whole, *arguments))
    once = replace(calls, place=place_whole)
    admissions = [
        Admission(
            window=window,
            topology=config.topology,
            cost=config.cost if cost is None else cost,
            carried=carried,
            policy=policy,
            options=config.planner_options(),
            deadline_seconds=config.planner.deadline_seconds,
            calls=once,
        )
        for window in windows
    ]
    for admission in admissions:
        admission.start_schedule()
    return admissions


def _from_rank_0(value):
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
