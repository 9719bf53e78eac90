"""Admit one sealed window on all ranks: rank 0 plans, everyone commits and gets the same plan."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from app.config import RunConfig
from app.local.trainer import LocalTrainer
from planner.placement import Placement
from planner.plan import Plan
from planner.window import Window
from rollout_hooks.admission import Admission, PlannerCalls
from train_hooks.commit import CommitReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Admitted:
    """A window ready to train, and the seconds of its way there (docs/metrics.md).

    moved_mb: megabytes (2^20) of expert state that left a rank, over all ranks.
    exposed: seconds that planning, commit and waiting added between sealing and the first row.
    """

    plan: Plan
    commit: CommitReport
    moved_mb: float
    fallback: str | None
    time_place: float
    time_plan: float
    time_state: float
    time_batch_await: float
    overlap: float
    exposed: float


def admit(
    config: RunConfig,
    trainer: LocalTrainer,
    window: Window,
    policy: str,
    calls: PlannerCalls,
    load_state: Callable[[], None] = lambda: None,
) -> Admitted:
    """Place, load state and commit while rows are searched, join; collective over all ranks.

    load_state: brings this rank's state back before the commit; nothing in the embedded trainer,
    which never offloads.
    Raises LayoutError when the ranks do not hold the same plan.
    """
    carried = trainer.layout.placement()
    start = time.perf_counter()
    admission = None
    if dist.get_rank() == 0:
        admission = Admission(
            window=window,
            topology=config.topology,
            cost=config.cost,
            carried=carried,
            policy=policy,
            options=config.planner_options(),
            deadline_seconds=config.planner.deadline_seconds,
            calls=calls,
        )
        admission.start_schedule()
    state_started = time.perf_counter()
    load_state()
    placement: Placement = _from_rank_0(admission and admission.placement)
    report = trainer.committer.commit(
        placement,
        base_version=carried.version,
        window_id=window.window_id,
        digest=hashlib.sha256(placement.expert_of_slot.tobytes()).hexdigest(),
    )
    state_ended = time.perf_counter()
    joined = None
    if admission is not None:
        plan = admission.join()
        joined = (plan.to_bytes(), admission.fallback)
    plan_bytes, fallback = _from_rank_0(joined)
    plan = Plan.from_bytes(plan_bytes)
    plan.validate(window, config.topology, carried)
    ended = time.perf_counter()
    times = dict.fromkeys(("time_place", "time_plan", "overlap"), 0.0)
    if admission is not None:
        plan_ended = admission.schedule_ended_at or ended
        time_plan = plan_ended - admission.schedule_started_at
        hidden = min(plan_ended, state_ended) - max(admission.schedule_started_at, state_started)
        times = dict(
            time_place=admission.placed_at - admission.sealed_at,
            time_plan=time_plan,
            overlap=max(0.0, hidden) / time_plan if time_plan > 0 else 1.0,
        )
    await_seconds = torch.tensor(ended - state_ended)
    dist.all_reduce(await_seconds, op=dist.ReduceOp.MAX)
    bytes_sent = torch.tensor(report.bytes_sent)
    dist.all_reduce(bytes_sent)
    return Admitted(
        plan=plan,
        commit=report,
        moved_mb=bytes_sent.item() / 2**20,
        fallback=fallback,
        time_state=state_ended - state_started,
        time_batch_await=await_seconds.item(),
        exposed=ended - start,
        **times,
    )


def _from_rank_0(value):
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
