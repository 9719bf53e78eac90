"""Layouts that a CPU cannot run: the real class's state, built by hand, moved and compared.

HybridDeviceOptimizer offloads only CUDA parameters, and the precision-aware optimizer needs
Transformer Engine, so neither runs here. What a move touches are the maps and tensors they keep:
those are made with the classes' own structure on top of a real DistributedOptimizer.
"""

from __future__ import annotations

import app.local.cpu_megatron  # isort: skip  # noqa: F401  before megatron

import time
from collections import defaultdict

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from app.config import RunConfig
from app.local.policy_equivalence import random_placement
from app.matrix.layouts import StateLayout
from app.matrix.prove import Proof, _sum_over_stages, initialize_parallel
from app.matrix.trainer import MatrixTrainer
from train_hooks.state_by_expert import num_different, state_by_expert

HYBRID = StateLayout(
    name="HybridDeviceOptimizer, precision-aware, bf16", bf16=True, overlap_param_gather=True,
    overlap_grad_reduce=True,
)  # fmt: skip
HYBRID_FIRST_STEP = StateLayout(name="HybridDeviceOptimizer before its first step", bf16=True)
HYBRID_EDP = StateLayout(
    name="HybridDeviceOptimizer, EP 2 x EDP 2, cut experts", world=4, bf16=True
)
STRUCTURES = (HYBRID, HYBRID_FIRST_STEP, HYBRID_EDP)


def prove_structure_rank(config: RunConfig, shapes: tuple[StateLayout, ...]) -> list[Proof]:
    """Prove the structures one after the other; all need `config.ranks.world` ranks."""
    return [_prove(shape) for shape in shapes]


def offload(trainer: MatrixTrainer, *, stepped: bool) -> None:
    """Replace each torch optimizer by a HybridDeviceOptimizer that keeps its state on the host.

    With `stepped` the moments of the real steps are taken over, else there are none yet. The
    model's optimizer then is what `--optimizer-cpu-offload --use-precision-aware-optimizer` builds:
    bf16 shards of the model's buffer as its parameters, fp32 copies and moments beside them.
    """
    for part in trainer.optimizer.chained_optimizers:
        inner = part.optimizer
        hybrid = HybridDeviceOptimizer.__new__(HybridDeviceOptimizer)
        shards, states, masters = [], defaultdict(dict), {}
        for group in inner.param_groups:
            for index, master in enumerate(group["params"]):
                shard = torch.nn.Parameter(master.detach().bfloat16(), requires_grad=True)
                masters[shard] = master.detach().clone()
                if stepped:
                    moments = inner.state[master]
                    states[shard] = {k: moments[k].clone() for k in ("exp_avg", "exp_avg_sq")}
                    states[shard]["master_param"] = masters[shard]
                group["params"][index] = shard
                shards.append(shard)
        torch.optim.Optimizer.__init__(hybrid, inner.param_groups, {})
        hybrid.state = states
        hybrid.param_to_inner_param = masters
        part.optimizer = hybrid


def _prove(shape: StateLayout) -> Proof:
    started = time.perf_counter()
    initialize_parallel(shape)
    trainer = MatrixTrainer(shape)
    for step in range(2):
        trainer.step(step)
    trainer.state.wait_for_parameters()
    offload(trainer, stepped=shape.name != HYBRID_FIRST_STEP.name)
    before = state_by_expert(trainer.layout, trainer.state)
    placement = random_placement(trainer.layout.placement(), seed=21)
    report = trainer.committer.move_to(placement, "structure")
    after = state_by_expert(trainer.layout, trainer.state)
    names = {key[3] for key in before}
    expected = {"itself", "param"}
    if shape.name != HYBRID_FIRST_STEP.name:
        expected |= {"exp_avg", "exp_avg_sq"}
    assert names == expected, names
    trainer.layout.finish_change(random_placement(placement, seed=22))
    control = num_different(before, state_by_expert(trainer.layout, trainer.state)) > 0
    totals = _sum_over_stages(len(before), num_different(before, after), 0, report.bytes_sent)
    return Proof(
        name=shape.name,
        kind="structure",
        num_tensors=int(totals[0]),
        num_different=int(totals[1]),
        num_later=0,
        later_difference=0.0,
        loss_difference=0.0,
        moved_mb=totals[3] / 2**20,
        seconds=time.perf_counter() - started,
        noticed=control,
    )
