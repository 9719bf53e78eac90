"""Anything that may lie under experts, drawn by hypothesis: moved with its expert, or refused."""

from __future__ import annotations

import app.local.cpu_megatron  # isort: skip  # noqa: F401  before megatron

from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from app.local.policy_equivalence import random_placement
from app.matrix.layouts import StateLayout
from app.matrix.prove import initialize_parallel
from app.matrix.trainer import MatrixTrainer
from train_hooks.commit import CommitOptions, Committer
from train_hooks.expert_state import ExpertState

NUM_LOCAL = 12
SHAPE = StateLayout(name="items", world=1, ep=1, optimizer="none")
ADAM = StateLayout(name="entries")


@dataclass(frozen=True)
class Item:
    """kind: how it is held; spread: numbered (one an expert), one missing, or one tensor."""

    kind: str
    module: str
    name: str
    spread: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    late: bool


names = st.from_regex(r"(x_|lora_|_x|x_adapter_)[a-z]{1,5}", fullmatch=True)
items = st.builds(
    Item,
    kind=st.sampled_from(["parameter", "buffer", "attribute", "module", "list"]),
    module=st.sampled_from(["", "linear_fc1", "linear_fc2"]),
    name=names,
    spread=st.sampled_from(["numbered", "one missing", "one tensor"]),
    shape=st.sampled_from([(), (1,), (5,), (NUM_LOCAL,), (NUM_LOCAL, 3), (3, NUM_LOCAL), (2, 2)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64]),
    late=st.booleans(),
)


def put(experts: nn.Module, item: Item) -> list[torch.Tensor]:
    """Put the item's tensors, of distinct values, under `experts`."""
    count = {"numbered": NUM_LOCAL, "one missing": NUM_LOCAL - 1, "one tensor": 1}[item.spread]
    tensors = []
    for index in range(count):
        size = torch.Size(item.shape).numel()
        values = torch.arange(size).view(item.shape) + 1 + size * index
        tensors.append(values.to(item.dtype))
    owner = experts.get_submodule(item.module)
    if item.kind == "module":
        inner = nn.Module()
        owner.register_module(f"{item.name}_inside", inner)
        owner = inner
    if item.kind == "list":
        setattr(owner, item.name, tensors)
        return tensors
    for index, tensor in enumerate(tensors):
        name = item.name if item.spread == "one tensor" else f"{item.name}{index}"
        if item.kind == "attribute":
            setattr(owner, name, tensor)
        elif item.kind == "buffer" or not tensor.is_floating_point():
            owner.register_buffer(name, tensor)
        else:
            param = nn.Parameter(tensor)
            owner.register_parameter(name, param)
            tensors[index] = param
    return tensors


def rows(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """One expert's part by slot."""
    found = list(tensors[0]) if len(tensors) == 1 else tensors
    return [t.detach().clone() for t in found]


def move(trainer: MatrixTrainer, committer: Committer):
    placement = random_placement(trainer.layout.placement(), seed=3)
    committer.move_to(placement, "drawn")
    return placement.expert_of_slot[0]


def settled(trainer: MatrixTrainer) -> bool:
    """Whether nothing has moved and the old layout still runs."""
    at_home = (trainer.layout.expert_of_slot(2) == range(NUM_LOCAL)).all()
    return bool(at_home) and trainer.evaluate(3) == trainer.evaluate(3)


def items_are_moved_or_refused(config) -> Counter:
    """How often each end came; raises where an item was ignored."""
    initialize_parallel(SHAPE)
    ends: Counter = Counter()

    @settings(max_examples=120, deadline=None, database=None, derandomize=True,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(items)
    def check(item: Item) -> None:
        trainer = MatrixTrainer(SHAPE)
        experts = next(iter(trainer.layout.layers.values())).experts
        tensors = [] if item.late else put(experts, item)
        try:
            state = ExpertState(trainer.chunks, None, trainer.layout)
            committer = Committer(trainer.layout, state, CommitOptions(verify="full"))
            if item.late:
                tensors = put(experts, item)
            before = rows(tensors) if tensors[0].dim() or len(tensors) > 1 else []
            expert_of_slot = move(trainer, committer)
        except RuntimeError as error:
            assert item.name in str(error), (item, error)
            assert settled(trainer)
            ends["refused late" if item.late else "refused"] += 1
            return
        after = rows(tensors)
        assert len(before) == NUM_LOCAL, f"{item} was ignored"
        for slot, expert in enumerate(expert_of_slot):
            assert torch.equal(after[slot], before[expert]), f"{item} was ignored"
        ends["moved"] += 1

    check()
    return ends


@dataclass(frozen=True)
class Entry:
    """An optimizer's entry: in its state or in a map of its own, from the first step or later."""

    holder: str
    name: str
    size: str
    late: bool
    some: bool


entries = st.builds(
    Entry,
    holder=st.sampled_from(["state", "_scales", "map"]),
    name=st.from_regex(r"x_[a-z]{1,5}", fullmatch=True),
    size=st.sampled_from(["element", "one", "three"]),
    late=st.booleans(),
    some=st.booleans(),
)


class _Keeping(torch.optim.SGD):
    """Keeps the drawn entry of every parameter from its first step on."""

    entry: Entry

    def __init__(self, params, lr=1e-3, **unused):
        super().__init__(params, lr=lr)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault("momentum", torch.zeros_like(param))
        if not self.entry.late:
            self.keep()

    def keep(self) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        for number, param in enumerate(params):
            if self.entry.some and number % 2:
                continue
            size = {"element": param.numel(), "one": 1, "three": 3}[self.entry.size]
            value = torch.full((size,), float(number + 1 + 1000 * dist.get_rank()))
            if self.entry.holder == "state":
                self.state[param].setdefault(self.entry.name, value)
            elif self.entry.holder == "_scales":
                self._scales = getattr(self, "_scales", {})
                self._scales.setdefault(param, {}).setdefault(self.entry.name, value[:1])
            else:
                held = vars(self).setdefault(self.entry.name, {})
                held.setdefault(param, value)


def held_of(inner: torch.optim.Optimizer, entry: Entry, shard: torch.Tensor) -> torch.Tensor | None:
    if entry.holder == "state":
        return inner.state[shard].get(entry.name)
    if entry.holder == "_scales":
        return inner._scales.get(shard, {}).get(entry.name)
    return vars(inner).get(entry.name, {}).get(shard)


def by_slot(trainer: MatrixTrainer, entry: Entry) -> list[torch.Tensor | None]:
    """What is held of every slot of the first MoE layer, over all ranks."""
    part = trainer.state.optimizer
    layer = next(iter(trainer.layout.layers.values()))
    mine = []
    for local in range(layer.experts.num_local_experts):
        param = getattr(layer.experts.linear_fc1, f"weight{local}")
        group, order = part.model_param_group_index_map[param]
        shard = part.optimizer.param_groups[group]["params"][order]
        held = held_of(part.optimizer, entry, shard)
        mine.append(held)
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return [value for values in everyone for value in values]


def entries_are_moved_or_refused(config) -> Counter:
    """As `items_are_moved_or_refused`, of what the optimizer holds."""
    initialize_parallel(ADAM)
    ends: Counter = Counter()
    adam = torch.optim.AdamW

    @settings(max_examples=40, deadline=None, database=None, derandomize=True,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(entries)
    def check(entry: Entry) -> None:
        _Keeping.entry = entry
        torch.optim.AdamW = _Keeping
        trainer = None
        try:
            trainer = MatrixTrainer(ADAM)
            trainer.step(0)
            trainer.state.optimizer.optimizer.keep()
            before = by_slot(trainer, entry)
            expert_of_slot = move(trainer, trainer.committer)
        except RuntimeError as error:
            assert entry.name in str(error) or "different state" in str(error), (entry, error)
            assert trainer is None or settled(trainer)
            ends["refused"] += 1
            return
        finally:
            torch.optim.AdamW = adam
        after = by_slot(trainer, entry)
        for slot, expert in enumerate(expert_of_slot):
            assert torch.equal(after[slot], before[expert]), f"{entry} was ignored"
        ends["moved"] += 1

    check()
    return ends
