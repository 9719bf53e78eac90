"""One rank of the admission bench: the embedded trainer with state that has to be loaded.

Per window three modes alternate, from the same carried layout: `bare` restores state and nothing
else; `alone` restores and commits what the planner decided earlier; `planned` is the real
admission, which places, and searches rows while state is restored and committed.
"""

from __future__ import annotations

import app.local.cpu_megatron  # isort: skip  # noqa: F401  before megatron

import time
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.distributed as dist

from app.config import RunConfig
from app.local.admit import Admitted, admit
from app.local.engine import EmbeddedEngine
from app.local.grpo import advantages
from app.local.model import build_hf
from app.local.rollout import SampledWindow, sample_window
from app.local.session import Session
from app.local.trainer import grpo_step_inputs
from planner.move_cost import MoveCost
from planner.policy import place, schedule
from planner.warm_up import compile_planner
from rollout_hooks.admission import PlannerCalls
from rollout_hooks.background import in_background

POLICY = "full"
ALLOWED_SECONDS, ALLOWED_SHARE = 0.020, 0.005


class HostCopies:
    """Weights and Adam moments of one rank in host memory, as an offloading trainer keeps them."""

    def __init__(self, session: Session):
        self.live = list(_live_tensors(session))
        self.copies = [tensor.clone() for tensor in self.live]

    @torch.no_grad()
    def restore(self) -> None:
        """Copy everything back into the live tensors."""
        for tensor, copy in zip(self.live, self.copies):
            tensor.copy_(copy)

    @property
    def num_bytes(self) -> int:
        return sum(copy.numel() * copy.element_size() for copy in self.copies)


class Decisions:
    """The planner's calls, remembered: `replayed` returns what `real` decided, at no cost."""

    def __init__(self, move: MoveCost):
        self.move = move
        self.placed = self.scheduled = None
        self.real = PlannerCalls(place=self._place, schedule=in_background(self._schedule))
        self.replayed = PlannerCalls(
            place=lambda *_: self.placed, schedule=lambda *_: self.scheduled
        )

    def _place(self, window, topology, carried, policy, options):
        options = replace(options, move=self.move)
        self.placed = place(window, topology, carried, policy, options)
        return self.placed

    def _schedule(self, *arguments):
        self.scheduled = schedule(*arguments)
        return self.scheduled


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One planned admission beside its neighbours in time, seconds."""

    admitted: Admitted
    state_alone: float
    state_bare: float


def measure(config: RunConfig, num_windows: int, num_repeats: int) -> list[dict[str, float]]:
    """Figures of every window after the warm-up one; alike on all ranks."""
    session = _open(config)
    found, move = [], MoveCost()
    for window_id in range(num_windows + 1):
        started = time.perf_counter()
        rollout = sample_window(config, session.engine, window_id)
        sample_seconds = time.perf_counter() - started
        sealed = time.perf_counter()
        advantage = advantages(rollout.rewards, rollout.window.group)
        time_aux = time.perf_counter() - sealed
        samples = _alternate(session, rollout, move, num_repeats)
        admitted = samples[-1].admitted
        micro_batches, loss = grpo_step_inputs(
            rollout.trajectories, advantage, admitted.plan, config.train.ratio_clip
        )
        step = session.trainer.step(micro_batches, loss)
        started = time.perf_counter()
        session.engine.update_weights(session.trainer.bridge.export())
        export_seconds = time.perf_counter() - started
        rest = time_aux + step.seconds + export_seconds
        if not window_id:
            move = _priced(config, admitted, step.seconds)
        else:
            found.append(_figures(samples, time_aux, rest) | {"sample_seconds": sample_seconds})
    return found


def _open(config: RunConfig) -> Session:
    from app.local.trainer import LocalTrainer

    hf = build_hf(config.model, config.routing_skew, config.seed)
    trainer = LocalTrainer(config)
    trainer.bridge.load(hf.state_dict())
    if dist.get_rank() == 0:
        compile_planner(config.cost, config.planner_options(), pp=config.topology.pp)
    dist.barrier()
    return Session(config=config, engine=EmbeddedEngine(hf, config.seed), trainer=trainer)


def _priced(config: RunConfig, admitted: Admitted, step_seconds: float) -> MoveCost:
    """What the warm-up window says a move costs and balance saves (`stop: net_benefit`)."""
    model = config.model
    num_bytes = 3 * model.hidden_size * model.moe_ffn_hidden_size * 4.0 * 3
    moved = max(1, admitted.commit.num_moved)
    return MoveCost(
        bytes_per_expert=num_bytes,
        seconds_per_byte=admitted.commit.seconds / (moved * num_bytes),
        seconds_per_cost=step_seconds / admitted.plan.report["joint_cost"],
    )


def _alternate(
    session: Session, rollout: SampledWindow, move: MoveCost, num_repeats: int
) -> list[Sample]:
    """Each repeat runs the three modes in rotated order; the layout ends as planned."""
    copies, decisions = HostCopies(session), Decisions(move)
    carried = session.trainer.layout.placement()

    def admission(calls: PlannerCalls) -> Admitted:
        session.trainer.layout.finish_change(carried)  # its tensors come back with the restore
        dist.barrier()
        return admit(session.config, session.trainer, rollout.window, POLICY, calls, copies.restore)

    def bare() -> float:
        dist.barrier()
        start = time.perf_counter()
        copies.restore()
        return _slowest(time.perf_counter() - start)

    admission(decisions.real)  # warm-up; what `alone` replays
    samples = []
    for repeat in range(num_repeats):
        seen = {}
        modes = ["bare", "alone", "planned"]
        for mode in modes[repeat % 3 :] + modes[: repeat % 3]:
            if mode == "bare":
                seen[mode] = bare()
            else:
                calls = decisions.real if mode == "planned" else decisions.replayed
                seen[mode] = admission(calls)
        samples.append(
            Sample(
                admitted=seen["planned"],
                state_alone=_slowest(seen["alone"].time_state),
                state_bare=seen["bare"],
            )
        )
    admission(decisions.replayed)
    return samples


def _figures(samples: list[Sample], time_aux: float, rest: float) -> dict[str, float]:
    """Medians over the repeats of one window; rest: its seconds outside admission."""
    planned = [sample.admitted for sample in samples]
    states = [_slowest(a.time_state) for a in planned]
    exposed = [_slowest(a.exposed) - s.state_bare for a, s in zip(planned, samples)]
    window_seconds = median(_slowest(a.exposed) for a in planned) + rest
    exposed_seconds = max(0.0, median(exposed))
    return {
        "overlap": median(a.overlap for a in planned),
        "exposed_ms": 1e3 * exposed_seconds,
        "exposed_over_allowed": exposed_seconds
        / max(ALLOWED_SECONDS, ALLOWED_SHARE * window_seconds),
        "gate_tail_ms": 1e3 * median(max(0.0, a.time_place - time_aux) for a in planned),
        "state_slowdown": median(states) / median(s.state_alone for s in samples),
        "state_seconds": median(states),
        "restore_seconds": median(s.state_bare for s in samples),
        "commit_ms": 1e3 * median(a.commit.seconds for a in planned),
        "plan_seconds": median(a.time_plan for a in planned),
        "batch_await_ms": 1e3 * median(a.time_batch_await for a in planned),
        "moved_experts": float(planned[-1].commit.num_moved),
        "moved_mb": planned[-1].moved_mb,
        "window_seconds": window_seconds,
    }


def _live_tensors(session: Session):
    trainer = session.trainer
    yield from (param.data for param in trainer.ddp.parameters())
    for part in trainer.optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value))


def _slowest(seconds: float) -> float:
    total = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(total, op=dist.ReduceOp.MAX)
    return total.item()
