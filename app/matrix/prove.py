"""Move every expert of a state layout at random and compare with a run that was left alone."""

from __future__ import annotations

import app.local.cpu_megatron  # isort: skip  # noqa: F401  before megatron

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from app.config import RunConfig
from app.local.policy_equivalence import random_placement
from app.matrix.layouts import StateLayout
from app.matrix.trainer import MatrixTrainer
from train_hooks import prepare
from train_hooks.expert_state import ExpertState
from train_hooks.layout import LayoutError
from train_hooks.pieces import Piece, pieces_of_layer
from train_hooks.state_by_expert import max_difference, num_different, state_by_expert

NUM_STEPS_AFTER = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """What one layout showed, summed over ranks and stages.

    num_different: tensors that changed by logical expert in the move. num_later: that differ from
    the undisturbed run three steps later, routers and their biases included; loss_difference:
    largest loss difference of these steps.
    noticed: whether the run noticed a layout changed without its state (negative control).
    forgotten: whether it noticed what an earlier RoutePack left behind (second control); None where
    that was nothing.
    """

    name: str
    num_tensors: int
    num_different: int
    num_later: int
    later_difference: float
    loss_difference: float
    moved_mb: float
    seconds: float
    noticed: bool
    forgotten: bool | None

    @property
    def exact(self) -> bool:
        """True when the move changed nothing but places, and training went on alike."""
        return not self.num_different and not self.num_later and self.loss_difference == 0


def prove_rank(config: RunConfig, shapes: Sequence[StateLayout]) -> list[Proof]:
    """Prove `shapes` one after the other in this rank; all need `config.ranks.world` ranks."""
    return [_prove(shape) for shape in shapes]


def initialize_parallel(shape: StateLayout) -> None:
    """Replace the process groups by those of `shape`."""
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=shape.tp,
        pipeline_model_parallel_size=shape.pp,
        virtual_pipeline_model_parallel_size=shape.vpp if shape.vpp > 1 else None,
        context_parallel_size=shape.cp,
        expert_model_parallel_size=shape.ep,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )


def _prove(shape: StateLayout) -> Proof:
    started = time.perf_counter()
    initialize_parallel(shape)
    alone, moved = MatrixTrainer(shape), MatrixTrainer(shape)
    for trainer in (alone, moved):
        for step in range(shape.steps_before):
            trainer.step(step)
        if shape.reloaded:
            trainer.reload_optimizer()
    before = state_by_expert(moved.layout, moved.state)
    placement = random_placement(moved.layout.placement(), seed=11)
    report = moved.committer.commit(
        placement, base_version=moved.layout.version, window_id=1, digest="matrix"
    )
    after = state_by_expert(moved.layout, moved.state)
    if shape.split:  # the optimizer's tensors follow inside the next step, after its backward
        before, after = _parameters_only(before), _parameters_only(after)
    steps = range(shape.steps_before, shape.steps_before + NUM_STEPS_AFTER)
    losses = [abs(alone.step(s) - moved.step(s)) for s in steps]
    later_alone = state_by_expert(alone.layout, alone.state)
    later_moved = state_by_expert(moved.layout, moved.state)
    routers_differ = _num_routers_different(alone, moved)
    moved.layout.finish_change(
        replace(random_placement(placement, seed=12), version=moved.layout.version)
    )
    control = abs(alone.step(99) - moved.step(99))
    forgotten = _notices_what_is_forgotten(alone) if shape.left_behind else None
    totals = _sum_over_stages(
        len(before),
        num_different(before, after),
        num_different(later_alone, later_moved) + routers_differ,
        report.bytes_sent,
    )
    num_tensors, num_wrong, num_later, num_bytes = totals
    return Proof(
        name=shape.name,
        num_tensors=int(num_tensors),
        num_different=int(num_wrong),
        num_later=int(num_later),
        later_difference=max_difference(later_alone, later_moved),
        loss_difference=max(losses),
        moved_mb=num_bytes / 2**20,
        seconds=time.perf_counter() - started,
        noticed=control > 1e-6,
        forgotten=forgotten,
    )


def _notices_what_is_forgotten(trainer: MatrixTrainer) -> bool:
    """Move experts as an earlier RoutePack did, without `left_behind`; whether that shows.

    Both witnesses must see it: `verify: full` of the commit, and the state by logical expert.
    """
    placement = random_placement(trainer.layout.placement(), seed=13)
    if trainer.shape.left_behind == ("workspaces",):
        expected = trainer.evaluate(98)
        with _instead(ExpertState, "rebuild_derived", lambda state: None):
            trainer.committer.move_to(placement, "control")
        return abs(trainer.evaluate(98) - expected) > 1e-6
    before = state_by_expert(trainer.layout, trainer.state)
    with _instead(prepare, "pieces_of_layer", partial(_pieces_without, trainer.shape.left_behind)):
        try:
            trainer.committer.move_to(placement, "control")
            refused = False
        except LayoutError as error:
            refused = "is not exact" in str(error)
    trainer.layout.finish_change(placement)
    return refused and num_different(before, state_by_expert(trainer.layout, trainer.state)) > 0


def _pieces_without(left_behind: Sequence[str], *args, **kwargs) -> Iterator[list[Piece]]:
    for unit in pieces_of_layer(*args, **kwargs):
        kept = [p for p in unit if not any(n in f"{p.name} {p.key}" for n in left_behind)]
        if kept:
            yield kept


@contextmanager
def _instead(owner: object, name: str, value: object) -> Iterator[None]:
    """`owner.name` is `value` inside the block."""
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def _num_routers_different(alone: MatrixTrainer, moved: MatrixTrainer) -> int:
    """Router weights and expert biases that differ: they are logical and never move."""
    return sum(
        not torch.equal(getattr(alone.layout.layers[n].router, name), getattr(layer.router, name))
        for n, layer in moved.layout.layers.items()
        for name in ("weight", "expert_bias")
    )


def _parameters_only(state: dict) -> dict:
    return {key: tensor for key, tensor in state.items() if key[3] == "itself"}


def _sum_over_stages(num_tensors, num_wrong, num_later, num_bytes) -> list[float]:
    """Tensor counts are alike within a stage: rank 0 of each stage counts; bytes add over ranks."""
    first = mpu.get_tensor_and_data_parallel_group(with_context_parallel=True).rank() == 0
    counted = [x if first else 0 for x in (num_tensors, num_wrong, num_later)]
    totals = torch.tensor([*counted, num_bytes], dtype=torch.float64)
    dist.all_reduce(totals)
    return totals.tolist()
