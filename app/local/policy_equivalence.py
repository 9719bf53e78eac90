"""Proof on this machine that every policy trains the same model, with controls that must fail."""

from __future__ import annotations

import app.local.cpu_megatron  # isort: skip  # noqa: F401  before megatron

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from app.config import RunConfig
from app.local.admit import admit
from app.local.gradients import gather_gradients, gradient_difference
from app.local.grpo import advantages
from app.local.rollout import SampledWindow, sample_window
from app.local.session import Session, open_session
from app.local.snapshot import Snapshot, restore, take_snapshot
from app.local.trainer import StepResult, grpo_step_inputs
from app.results.progress import track
from planner.placement import Placement
from planner.plan import Plan
from planner.policies import COMPARED
from rollout_hooks.admission import PlannerCalls
from train_hooks.micro_batch import MicroBatch
from train_hooks.state_by_expert import max_difference, num_different, state_by_expert

TOLERANCE = 1e-5
NUM_STEPS_AFTER = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """Figures of `routepack verify`, and per control whether it was caught, as it must be."""

    figures: dict[str, float]
    controls: dict[str, bool]
    tiny_gradients: list[str]


def verify_rank(config: RunConfig, weights: str) -> Verification:
    """Run all checks on this rank; collective. Works in fp32 with clip 0."""
    exact = replace(config, train=replace(config.train, clip_grad=0.0))
    session = open_session(exact, weights)
    rollout = sample_window(exact, session.engine, 0)
    start = take_snapshot(session.trainer)
    figures, controls, tiny = {}, {}, []
    parts = ("policies", "foreign routing", "negative controls", "a move", "a move at top-2")
    for part in track(parts, "verify", dist.get_rank() == 0):
        if part == "policies":
            found, tiny = _check_policies(session, start, rollout)
        elif part == "foreign routing":
            found = _check_foreign_routing(session, start, rollout)
        elif part == "negative controls":
            found, controls = {}, _negative_controls(session, start, rollout)
        elif part == "a move":
            found = _check_move(session, start, rollout, "")
        else:
            found = _check_move_at_top_2(exact, weights)
        figures |= found
    figures["verify.negative_controls"] = float(len(controls))
    figures["verify.negative_controls_failed"] = float(sum(controls.values()))
    return Verification(figures=figures, controls=controls, tiny_gradients=tiny)


def _check_policies(
    session: Session, start: Snapshot, rollout: SampledWindow
) -> tuple[dict[str, float], list[str]]:
    """Loss and gradients of every policy against off on the same window."""
    gradients, losses = {}, {}
    for policy in COMPARED:
        restore(session.trainer, start)
        inputs = _admitted_inputs(session, rollout, policy)
        losses[policy] = session.trainer.step(*inputs, update=False)
        gradients[policy] = gather_gradients(session.trainer)
    worst, tiny = 0.0, []
    for policy in COMPARED[1:]:
        difference, tiny = gradient_difference(gradients["off"], gradients[policy])
        worst = max(worst, difference)
    loss = max(_loss_difference(losses["off"], losses[p]) for p in COMPARED[1:])
    figures = {"verify.grad_max_rel_diff": worst, "verify.loss_max_rel_diff": loss}
    return figures, tiny


def _check_move(
    session: Session, start: Snapshot, rollout: SampledWindow, suffix: str
) -> dict[str, float]:
    """Move every expert at random, then train on: state by logical id must not notice."""
    trainer = session.trainer
    restore(trainer, start)
    inputs = _admitted_inputs(session, rollout, "off")
    for _ in range(2):  # so that Adam moments exist
        trainer.step(*inputs)
    trained = take_snapshot(trainer)
    undisturbed = [trainer.step(*inputs) for _ in range(NUM_STEPS_AFTER)]
    expected = state_by_expert(trainer.layout, trainer.state)

    restore(trainer, trained)
    before = state_by_expert(trainer.layout, trainer.state)
    _commit(session, random_placement(trainer.layout.placement(), seed=1))
    after = state_by_expert(trainer.layout, trainer.state)
    moved = [trainer.step(*inputs) for _ in range(NUM_STEPS_AFTER)]
    final = state_by_expert(trainer.layout, trainer.state)
    losses = [abs(a.loss - b.loss) for a, b in zip(undisturbed, moved)]
    return {
        f"verify.moved_state_tensors{suffix}": float(len(before)),
        f"verify.moved_state_tensors_different{suffix}": float(num_different(before, after)),
        f"verify.later_state_tensors_different{suffix}": float(num_different(expected, final)),
        f"verify.later_state_max_abs_diff{suffix}": max_difference(expected, final),
        f"verify.later_loss_max_abs_diff{suffix}": max(losses),
    }


def _check_move_at_top_2(config: RunConfig, weights: str) -> dict[str, float]:
    """The same with two experts a token, where even later steps must be bit-identical."""
    top_2 = replace(config, model=replace(config.model, top_k=2, group_top_k=1))
    session = open_session(top_2, weights)
    rollout = sample_window(top_2, session.engine, 0)
    return _check_move(session, take_snapshot(session.trainer), rollout, "_top2")


def _check_foreign_routing(
    session: Session, start: Snapshot, rollout: SampledWindow
) -> dict[str, float]:
    """Replay random valid ids under a permuted layout: what arrives must be exactly those ids."""
    trainer = session.trainer
    restore(trainer, start)
    _commit(session, random_placement(trainer.layout.placement(), seed=2))
    batches, loss = _admitted_inputs(session, rollout, "off")
    foreign = foreign_routing(batches, session.config.model.num_experts, seed=dist.get_rank())
    wrong = _num_wrong_counts(session, foreign, loss, "foreign")
    return {"verify.foreign_counts_different": wrong}


def _negative_controls(
    session: Session, start: Snapshot, rollout: SampledWindow
) -> dict[str, bool]:
    """Break one thing at a time; True where the checks notice, as they must."""
    trainer = session.trainer
    restore(trainer, start)
    batches, loss = _admitted_inputs(session, rollout, "off")
    reference = trainer.step(batches, loss, update=False)
    gradients = gather_gradients(trainer)

    def differs(step: StepResult) -> bool:
        worst, _ = gradient_difference(gradients, gather_gradients(trainer))
        return _loss_difference(reference, step) > TOLERANCE or worst > TOLERANCE

    caught = {}
    identity = trainer.layout.placement()
    permuted = random_placement(identity, seed=3)
    trainer.layout.finish_change(permuted)
    caught["layout changed without moving state"] = differs(
        trainer.step(batches, loss, update=False)
    )
    restore(trainer, start)
    _commit(session, permuted)
    trainer.layout.finish_change(identity)
    caught["state moved without the layout"] = differs(trainer.step(batches, loss, update=False))
    restore(trainer, start)
    foreign = foreign_routing(batches, session.config.model.num_experts, seed=dist.get_rank())
    caught["replay off with foreign ids"] = _num_wrong_counts(session, foreign, loss, "free") > 0
    restore(trainer, start)
    caught["a dropped trajectory"] = differs(
        trainer.step(*_inputs_without_one(session, rollout, loss), update=False)
    )
    return caught


def _admitted_inputs(session: Session, rollout: SampledWindow, policy: str):
    admitted = admit(session.config, session.trainer, rollout.window, policy, PlannerCalls())
    advantage = advantages(rollout.rewards, rollout.window.group)
    ratio_clip = session.config.train.ratio_clip
    return grpo_step_inputs(rollout.trajectories, advantage, admitted.plan, ratio_clip)


def _inputs_without_one(session: Session, rollout: SampledWindow, loss):
    """The rows of `off` less the trajectory of largest advantage that shares its cell."""
    admitted = admit(session.config, session.trainer, rollout.window, "off", PlannerCalls())
    plan: Plan = admitted.plan
    advantage = advantages(rollout.rewards, rollout.window.group)
    cell = plan.rows.cell.copy()
    shares_its_cell = np.bincount(cell[cell >= 0])[cell] > 1
    dropped = int(np.argmax(np.abs(advantage) * (shares_its_cell & (cell >= 0))))
    cell[dropped] = -1
    broken = replace(plan, rows=replace(plan.rows, cell=cell))
    batches, _ = grpo_step_inputs(rollout.trajectories, advantage, broken, 0.2)
    return batches, loss


def _commit(session: Session, placement: Placement) -> None:
    session.trainer.committer.move_to(placement, "verify")


def random_placement(like: Placement, seed: int) -> Placement:
    """A placement with every layer permuted at random, the successor of `like`."""
    rng = np.random.default_rng(seed)
    shuffled = rng.permuted(like.expert_of_slot, axis=1)
    return Placement(
        expert_of_slot=shuffled.astype(np.int32),
        num_ep_ranks=like.num_ep_ranks,
        version=like.version + 1,
    )


def foreign_routing(batches: Sequence[MicroBatch], num_experts: int, seed: int) -> list[MicroBatch]:
    """The same micro-batches with random, valid expert ids that no router would choose."""
    generator = torch.Generator().manual_seed(seed)
    changed = []
    for batch in batches:
        num_layers, num_positions, top_k = batch.routed.shape
        order = torch.rand(num_layers, num_positions, num_experts, generator=generator)
        ids = order.argsort(dim=-1)[..., :top_k]
        counts = torch.stack([torch.bincount(i.flatten(), minlength=num_experts) for i in ids])
        changed.append(replace(batch, routed=ids, counts=counts))
    return changed


def _num_wrong_counts(session: Session, batches, loss, routing: str) -> float:
    """Experts, over rows, layers and ranks, whose token count is not what `batches` say."""
    trainer = session.trainer
    for seam in trainer.layout.seams.values():
        seam.received_counts = []
    trainer.step(batches, loss, routing=routing, update=False)
    wrong = torch.zeros((), dtype=torch.float64)
    for index, (number, seam) in enumerate(trainer.layout.seams.items()):
        order = torch.from_numpy(trainer.layout.expert_of_slot(number))
        for batch, by_slot in zip(batches, seam.received_counts, strict=True):
            by_expert = torch.empty_like(by_slot)
            by_expert[order] = by_slot
            wrong += (by_expert != batch.counts[index]).sum()
        seam.received_counts = None
    dist.all_reduce(wrong)
    return wrong.item()


def _loss_difference(reference: StepResult, other: StepResult) -> float:
    return abs(reference.loss - other.loss) / reference.loss_magnitude
