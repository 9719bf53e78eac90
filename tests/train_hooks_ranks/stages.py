"""Two pipeline stages, of which a plan moves experts of one only."""

from __future__ import annotations

import app.local.cpu_megatron  # isort: skip  # noqa: F401  before megatron

from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state as mpu

from app.local.policy_equivalence import random_placement
from app.matrix.layouts import StateLayout
from app.matrix.prove import initialize_parallel
from app.matrix.trainer import MatrixTrainer

SHAPE = StateLayout(name="PP 2 x EP 2", world=4, pp=2)


def settles_with_one_stage_moving(config, told: bool) -> dict:
    """A commit after an asynchronous save whose end is a collective of the world.

    told: whether the stage without moves hears that the other has some. Returns rank 0's error
    and whether every rank settled.
    """
    initialize_parallel(SHAPE)
    trainer = MatrixTrainer(SHAPE)
    trainer.step(0)
    here = trainer.layout.placement()
    plan = random_placement(here, seed=3)
    if not mpu.is_pipeline_first_stage():
        plan = replace(here, version=plan.version)
    settled = []

    def end_of_save():
        dist.monitored_barrier(timeout=timedelta(seconds=60 if told else 8))
        settled.append(True)

    trainer.committer.before_next_move = end_of_save
    error = ""
    try:
        trainer.committer.commit(
            plan, base_version=here.version, window_id=1, digest="d", moves_elsewhere=told
        )
    except RuntimeError as caught:
        error = str(caught)
    return {"error": error, "settled": bool(settled)}
