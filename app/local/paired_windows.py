"""The paired comparison: every policy trains the same windows from the same state.

Protocol (definitions.md, Paired comparison): per window restore one snapshot; each policy commits
its own carried placement, plans and commits this window's, runs one warm-up and timed repeats; the
order of policies rotates; the snapshot then advances by the base step. The ideal runs the rows of
`off` with perfectly balanced forced routing, for timing only.
"""

from __future__ import annotations

import app.local.cpu_megatron  # isort: skip  # noqa: F401  before megatron

import statistics
import time
from dataclasses import replace

import torch
import torch.distributed as dist

from app.config import RunConfig
from app.local.admit import Admitted, admit
from app.local.equivalence import check_engines
from app.local.grpo import advantages
from app.local.machine_load import cpu_seconds, other_load
from app.local.measurement import CONTROL, IDEAL, Comparison, Measurement
from app.local.rollout import SampledWindow, sample_window
from app.local.session import Session, open_session
from app.local.skew import measure_skew, rank_max_over_mean
from app.local.snapshot import Snapshot, restore, take_snapshot
from app.local.steps import combined, rollout_inputs
from app.local.trainer import StepResult
from app.results.plan_details import rank_load_detail, rows_detail
from app.results.progress import track
from planner.placement import Placement
from planner.policies import FULL_OVER_OFF
from rollout_hooks.admission import PlannerCalls
from rollout_hooks.estimate import demand_shares
from train_hooks.micro_batch import MicroBatch
from train_hooks.row_execution import Routing


def compare_rank(
    config: RunConfig, policies: tuple[str, ...], weights: str, server_url: str | None = None
) -> Comparison:
    """Measure `policies`, a second base as control, and the ideal, on every window."""
    is_writer = dist.get_rank() == 0
    session = open_session(config, weights, server_url)
    trainer, engine = session.trainer, session.engine
    named = {policy: policy for policy in policies} | {CONTROL: "base"}
    carried = {name: trainer.layout.placement() for name in named}
    snapshot = take_snapshot(trainer)
    measurements: list[Measurement] = []
    last_admitted: dict[str, Admitted] = {}
    shares, check, skew = None, None, None
    load_before, started = cpu_seconds(), time.perf_counter()
    for window_id in track(range(config.compare.num_windows), "compare", is_writer):
        restore(trainer, snapshot)
        rollout = sample_window(config, engine, window_id, shares)
        if check is None:
            check, skew = check_engines(trainer, rollout), measure_skew(session, rollout)
        shares = demand_shares(rollout.window.demand)
        names = [*named, IDEAL]
        turn = window_id % len(names)
        next_snapshot = None
        for name in names[turn:] + names[:turn]:
            if name == IDEAL:
                measurements.append(_measure_ideal(session, snapshot, rollout))
                continue
            measurement, admitted, stepped = measure_policy(
                session, snapshot, rollout, name, named[name], carried[name]
            )
            measurements.append(measurement)
            carried[name], last_admitted[name] = admitted.plan.placement, admitted
            if name == CONTROL:
                next_snapshot = stepped
        snapshot = next_snapshot
        restore(trainer, snapshot)
        engine.update_weights(trainer.bridge.export())
    identity = Placement.identity(*carried["base"].expert_of_slot.shape, config.ranks.ep)
    last = carried.get("full", carried[CONTROL])
    elapsed = time.perf_counter() - started
    return Comparison(
        measurements=measurements,
        max_log_prob_difference=check.max_log_prob_difference,
        equal_rows=check.equal_rows,
        other_load=other_load(load_before, elapsed),
        skew=skew,
        rank_load=rank_load_detail(rollout.window, identity, last),
        rows={
            name: rows_detail(
                last_admitted[name].plan,
                last_admitted[name].windows[0],
                config.topology,
                config.cost,
            )
            for name in reversed(FULL_OVER_OFF)
            if name in last_admitted
        },
    )


def measure_policy(
    session: Session,
    snapshot: Snapshot,
    rollout: SampledWindow,
    name: str,
    policy: str,
    carried: Placement,
) -> tuple[Measurement, Admitted, Snapshot | None]:
    """Run one policy on one window; return its figures, what was admitted, the control's state."""
    trainer, config = session.trainer, session.config
    restore(trainer, snapshot)
    _commit_untimed(session, carried, rollout.window.window_id)
    dist.barrier()
    started = time.perf_counter()
    advantage = advantages(rollout.rewards, rollout.window.group)
    time_aux = time.perf_counter() - started
    admitted = _admit(session, rollout, policy)
    reference = session.reference_log_probs(rollout.trajectories)
    inputs = rollout_inputs(
        config, rollout.trajectories, advantage, admitted.plans, admitted.positions, reference
    )
    admission = time.perf_counter() - started
    first = _train(session, inputs)
    stepped = None
    if name == CONTROL:
        stepped = take_snapshot(trainer)
    repeats = [combined(_train(session, inputs)) for _ in range(config.compare.num_repeats)]
    started = time.perf_counter()
    trainer.bridge.export()
    export = time.perf_counter() - started
    median = statistics.median(step.seconds for step in repeats)
    measurement = Measurement(
        window=rollout.window.window_id,
        policy=name,
        tps=[step.tps for step in repeats],
        window_seconds=admission + median + export,
        exposed=admitted.exposed,
        commit_seconds=admitted.commit.seconds,
        moved_experts=admitted.commit.num_moved,
        moved_mb=admitted.moved_mb,
        rows=sum(plan.rows.num_rows for plan in admitted.plans),
        joint_cost=sum(plan.report["joint_cost"] for plan in admitted.plans),
        J1_over_B=statistics.fmean(plan.report["J1_over_B"] for plan in admitted.plans),
        times={
            "place": admitted.time_place,
            "aux": time_aux,
            "plan": admitted.time_plan,
            "state": admitted.time_state,
            "batch_await": admitted.time_batch_await,
        },
        rank_max_over_mean=rank_max_over_mean(rollout.window.expert_load, admitted.plan.placement),
        loss=first[0].loss,
        loss_magnitude=first[0].loss_magnitude,
    )
    return measurement, admitted, stepped


def _measure_ideal(session: Session, snapshot: Snapshot, rollout: SampledWindow) -> Measurement:
    """Time the rows of `off` with every expert used equally often; captured routing is ignored."""
    trainer, config = session.trainer, session.config
    restore(trainer, snapshot)
    admitted = _admit(session, rollout, "off")
    advantage = advantages(rollout.rewards, rollout.window.group)
    inputs = [
        ([balanced_routing(batch, config.model.num_experts) for batch in micro_batches], loss)
        for micro_batches, loss in rollout_inputs(
            config, rollout.trajectories, advantage, admitted.plans, admitted.positions
        )
    ]
    first = _train(session, inputs, "foreign")
    repeats = [
        combined(_train(session, inputs, "foreign")) for _ in range(config.compare.num_repeats)
    ]
    return Measurement(
        window=rollout.window.window_id,
        policy=IDEAL,
        tps=[step.tps for step in repeats],
        window_seconds=0.0,
        exposed=0.0,
        commit_seconds=0.0,
        moved_experts=0,
        moved_mb=0.0,
        rows=sum(plan.rows.num_rows for plan in admitted.plans),
        joint_cost=0.0,
        J1_over_B=None,
        times={},
        rank_max_over_mean=1.0,
        loss=first[0].loss,
        loss_magnitude=first[0].loss_magnitude,
    )


def _admit(session: Session, rollout: SampledWindow, policy: str) -> Admitted:
    config = session.config
    num_steps = config.train.num_steps_per_rollout
    return admit(
        config, session.trainer, rollout.window, policy, PlannerCalls(), num_steps=num_steps
    )


def _train(session: Session, inputs, routing: Routing = "replay") -> list[StepResult]:
    """All optimizer steps of a rollout, one after the other."""
    return [session.trainer.step(batches, loss, routing=routing) for batches, loss in inputs]


def balanced_routing(batch: MicroBatch, num_experts: int) -> MicroBatch:
    """Give position i the experts i*top_k .. i*top_k + top_k - 1, modulo the number of experts."""
    num_layers, num_positions, top_k = batch.routed.shape
    ids = torch.arange(num_positions * top_k).view(num_positions, top_k) % num_experts
    return replace(batch, routed=ids.expand(num_layers, -1, -1).contiguous(), counts=None)


def _commit_untimed(session: Session, placement: Placement, window_id: int) -> None:
    session.trainer.committer.move_to(placement, "carried placement")
