"""Groups that moves use and training does not: each would start a communicator of its own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import app.local.cpu_megatron  # isort: skip  # noqa: F401  before megatron

import torch.distributed as dist

from app.config import RunConfig
from app.local.policy_equivalence import random_placement
from app.matrix.layouts import StateLayout
from app.matrix.prove import initialize_parallel
from app.matrix.trainer import MatrixTrainer
from train_hooks import transport

ENTRY_POINTS = (
    "all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all_single", "all_to_all", "broadcast", "barrier",
    "broadcast_object_list", "gather_object", "_all_gather_base", "_reduce_scatter_base",
)  # fmt: skip


@contextmanager
def counted_groups() -> Iterator[set[str]]:
    """Names of the groups with a collective or transfer inside the block."""
    used: set[str] = set()
    kept = {name: getattr(dist, name) for name in ENTRY_POINTS}
    prepared = transport.Preparation.__init__

    def counting(function):
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args, **kwargs):
            group = signature.bind(*args, **kwargs).arguments.get("group")
            used.add((group or dist.group.WORLD).group_name)
            return function(*args, **kwargs)

        return call

    def preparation(self, view, group, staging):
        used.add(group.group_name)
        prepared(self, view, group, staging)

    for name, function in kept.items():
        setattr(dist, name, counting(function))
    transport.Preparation.__init__ = preparation
    try:
        yield used
    finally:
        transport.Preparation.__init__ = prepared
        for name, function in kept.items():
            setattr(dist, name, function)


def groups_of_moves(config: RunConfig, shape: StateLayout) -> int:
    """How many groups a warmed job's commits use that its training steps do not."""
    initialize_parallel(shape)
    trainer = MatrixTrainer(shape)
    with counted_groups() as trained:
        trainer.step(0)
        trainer.step(1)
    with counted_groups() as moved:
        trainer.state.warm_group()
        for seed in (1, 2):
            trainer.committer.move_to(random_placement(trainer.layout.placement(), seed), "groups")
    return len(moved - trained)
