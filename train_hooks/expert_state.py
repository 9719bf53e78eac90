"""Where the state of every local expert lives: owned tensors, main copies, moments, host copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import nn

from train_hooks.inventory import Slice, fingerprint_of, take_inventory
from train_hooks.layout import ExpertLayout, LayoutError
from train_hooks.optimizer_state import (
    MAIN,
    ShardState,
    UnknownOptimizer,
    foreseen_entries,
    identity_of,
    shard_state,
    what_is_new,
)


class StateKind(NamedTuple):
    """One kind of optimizer state of an owned tensor, alike on every rank.

    factor: one number a shard, not one an element. with_parameter: the other half of the model
    parameter's bits (`store_param_remainders`): it moves when the parameter does.
    """

    key: str
    itemsize: int
    factor: bool
    with_parameter: bool


class HostCopies(Protocol):
    """Copies of the parameters on the host, by tag (slime's TensorBackuper)."""

    @property
    def tags(self) -> tuple[str, ...]:
        """Every tag, in one order on all ranks."""

    @property
    def live_tag(self) -> str | None:
        """The tag that equals the parameters of the model now, None if none does."""

    def of(self, tag: str, param: torch.Tensor) -> torch.Tensor:
        """The copy of `param` under `tag`, to be read or written in place."""


class ExpertState:
    """Address book of expert state over the EP x EDP ranks of one pipeline stage.

    Every rank computes every rank's ranges locally, because the buffers of all EP ranks have the
    same layout. `optimizer` is None for a model that is only evaluated; frozen experts have
    parameters and nothing else. Raises LayoutError or UnknownOptimizer, naming the item, for
    anything of an expert that could not be moved.

    Source: `param_index_map` and buckets of `_ParamAndGradBuffer`, shard sizes of
    `DistributedOptimizer` (megatron/core/optimizer/distrib_optimizer.py).
    """

    def __init__(self, model_chunks: Sequence[nn.Module], optimizer, layout: ExpertLayout):
        self.model_chunks, self.layout = list(model_chunks), layout
        self.inventory = {n: take_inventory(layer) for n, layer in layout.layers.items()}
        if mpu.get_expert_tensor_parallel_world_size() != 1:
            raise LayoutError(
                "expert tensor parallel size "
                f"{mpu.get_expert_tensor_parallel_world_size()} is not supported: set "
                "--expert-tensor-parallel-size 1"
            )
        self._address = {
            param: (start, buffer.buckets[bucket])
            for chunk in model_chunks
            for buffer in getattr(chunk, "expert_parallel_buffers", [])
            for param, (start, _, bucket) in buffer.param_index_map.items()
        }
        self.optimizer = _expert_optimizer(self.model_chunks, optimizer)
        if optimizer is not None:
            self._refuse_unknown_buffers()
        self.host_copies: HostCopies | None = None
        self.num_edp_ranks = mpu.get_expert_data_parallel_world_size()
        self.ep_rank = mpu.get_expert_model_parallel_rank()
        self.edp_rank = mpu.get_expert_data_parallel_rank()
        self._owners: dict[tuple[int, int], tuple[tuple[int, int, int], ...]] = {}
        self._kinds: dict[str, tuple[StateKind, ...]] | None = None
        self._shards: dict[int, tuple[tuple | None, ShardState | None]] = {}
        self._stepped = False
        self._foreseen: frozenset[str] = frozenset()
        if self.optimizer is not None:
            self._foreseen = foreseen_entries(self.optimizer)
            self.optimizer.optimizer.register_step_post_hook(self._remember_step)
        mine = (self.ep_rank, self.edp_rank)
        everyone: list = [None] * self.group.size()
        dist.all_gather_object(everyone, mine, group=self.group)
        self.rank_in_group = {place: rank for rank, place in enumerate(everyone)}

    def _refuse_unknown_buffers(self) -> None:
        for number, layer in self.inventory.items():
            for param in layer.parameters():
                if param.requires_grad and param not in self._address:
                    raise LayoutError(
                        f"experts of MoE layer {number} are trained, and are not in Megatron's "
                        "buffers of expert parameters, so their optimizer state would stay behind: "
                        f"set --expert-model-parallel-size above 1 (now "
                        f"{mpu.get_expert_model_parallel_world_size()}) and "
                        "--use-distributed-optimizer, or use --routepack-policy reschedule"
                    )

    @property
    def group(self) -> dist.ProcessGroup:
        """The existing group over EP x EDP of this stage.

        With EDP 1 it is the EP group, whose communicator every MoE layer uses anyway; else all of
        TP x CP x DP (ETP is 1).
        """
        if mpu.get_expert_data_parallel_world_size() == 1:
            return mpu.get_expert_model_parallel_group()
        return mpu.get_tensor_and_data_parallel_group(with_context_parallel=True)

    def warm_group(self) -> None:
        """Start the group's communicator with one small collective."""
        dist.all_reduce(torch.zeros(1, device=self.layout.device), group=self.group)

    def wait_for_parameters(self) -> None:
        """Finish gathers of expert parameters that overlap_param_gather left pending.

        A gather on its way is waited for; after a step whose gather waits for the next forward, it
        is done now. Without forward pre-hooks (slime removes them after training, with a gather)
        nothing is pending.
        """
        stepped, self._stepped = self._stepped, False
        for chunk in self.model_chunks:
            config = getattr(chunk, "ddp_config", None)
            if config is None or not config.overlap_param_gather:
                continue
            due = stepped and bool(chunk.remove_forward_pre_hook_handles)
            for bucket_group in chunk.expert_parallel_bucket_groups:
                if due or bucket_group.param_gather_handle is not None:
                    bucket_group.start_param_sync(force_sync=True)

    def refuse_what_is_new(self) -> None:
        """Raise for what appeared under the experts or in the optimizer since the job started."""
        for number, layer in self.layout.layers.items():
            if fingerprint_of(layer) == self.inventory[number].fingerprint:
                continue
            known = self.inventory[number].seen
            now = take_inventory(layer).seen  # refuses what is unknown
            if now != known:
                paths = sorted({entry[0] for entry in now ^ known})
                raise LayoutError(
                    f"experts of MoE layer {number} changed since RoutePack was switched on: "
                    f"{', '.join(paths[:4])} appeared, went or became another tensor. Change "
                    "experts before training starts, or run with --routepack-policy reschedule"
                )
        if self.optimizer is not None:
            new = what_is_new(self.optimizer, self._foreseen)
            if new is not None:
                raise UnknownOptimizer(new)

    def rebuild_derived(self) -> None:
        """Have quantised copies of weights rebuilt by the next micro-batch."""
        for layer in self.inventory.values():
            for module in layer.quantising:
                module.is_first_microbatch = True

    def owners(self, part: Slice) -> tuple[tuple[int, int, int], ...]:
        """(EDP rank, start, stop) of each owner of a shard of `part`, counted inside `part`."""
        key = (id(part.tensor), part.start)
        if key not in self._owners:
            address = self._address.get(part.tensor)
            known = self.optimizer is not None and address is not None
            self._owners[key] = tuple(self._owned_ranges(part, *address)) if known else ()
        return self._owners[key]

    def _owned_ranges(self, part: Slice, param_start: int, bucket):
        first = param_start + part.start
        shard = bucket.grad_data.numel() // self.num_edp_ranks
        for rank in range(self.num_edp_ranks):
            low = max(first, bucket.offset + rank * shard)
            high = min(first + part.num_elements, bucket.offset + (rank + 1) * shard)
            if low < high:
                yield rank, low - first, high - first

    def shard(self, tensor: torch.Tensor) -> ShardState | None:
        """This rank's optimizer state of an owned tensor; None if it has none."""
        if self.optimizer is None or tensor not in self._address:
            return None
        identity = identity_of(self.optimizer, tensor)
        held = self._shards.get(id(tensor))
        if held is None or held[0] != identity:
            held = identity, shard_state(self.optimizer, tensor)
            self._shards[id(tensor)] = held
        return held[1]

    def kinds(self) -> dict[str, tuple[StateKind, ...]]:
        """Optimizer state by name of what experts own; collective over `group`.

        A rank without a local shard cannot see it, yet must enumerate the same pieces. Once all
        that the optimizer's class keeps is there, it is not asked for again. Raises LayoutError
        where only some experts have state, and where factors of whole shards meet experts that
        shards cut.
        """
        if self._kinds is not None:
            return self._kinds
        try:
            mine, failure = self._kinds_here(), None
        except Exception as error:  # said on every rank: the others wait in the next line
            mine, failure = ({}, False), f"{type(error).__name__}: {error}"
        everyone: list = [None] * self.group.size()
        dist.all_gather_object(everyone, (*mine, failure), group=self.group)
        said = [f"rank {r}: {text}" for r, (_, _, text) in enumerate(everyone) if text]
        if said:
            raise LayoutError(f"nothing was moved; {'; '.join(said[:4])}")
        found: dict[str, set[frozenset[StateKind]]] = {}
        for theirs, _, _ in everyone:
            for name, kinds in theirs.items():
                found.setdefault(name, set()).update(kinds)
        for name, kinds in found.items():
            if len(kinds) != 1:
                keys = sorted({tuple(sorted(k.key for k in some)) for some in kinds})
                raise LayoutError(
                    f"the optimizer holds different state for {name} of different experts: {keys}. "
                    "Load its state whole or not at all; nothing was moved"
                )
        result = {name: tuple(sorted(next(iter(kinds)))) for name, kinds in found.items()}
        self._refuse_cut_factors(result)
        if all(done for _, done, _ in everyone):
            self._kinds = result
        return result

    def _kinds_here(self) -> tuple[dict[str, set[frozenset[StateKind]]], bool]:
        """The kinds of state on this rank, and whether that is all its class will keep."""
        mine: dict[str, set[frozenset[StateKind]]] = {}
        complete = True
        for layer in self.inventory.values():
            for slices in layer.experts:
                for name, part in zip(layer.names, slices):
                    held = self.shard(part.tensor)
                    if held is not None:
                        mine.setdefault(name, set()).add(_kinds_of(held))
                        complete &= self._all_there(held)
        return mine, complete

    def _all_there(self, held: ShardState) -> bool:
        names = {*held.elements} | ({"step"} if held.counter is not None else set())
        return self._foreseen - {"master_param", "step"} <= names

    def _refuse_cut_factors(self, kinds: dict[str, tuple[StateKind, ...]]) -> None:
        """A factor of a shard moves only with the whole shard: all experts must be cut alike."""
        for layer in self.inventory.values():
            for index, name in enumerate(layer.names):
                if not any(kind.factor for kind in kinds.get(name, ())):
                    continue
                parts = [slices[index] for slices in layer.experts]
                cuts = {self.owners(part) for part in parts}
                if len(cuts) > 1 or parts[0].num_elements != parts[0].tensor.numel():
                    raise LayoutError(
                        f"the optimizer keeps {name} with one factor a shard (fp16 or fp8 state), "
                        "and shards of the expert data parallel ranks cut experts differently: "
                        "parts of two factors would meet. Set --exp-avg-dtype and "
                        "--exp-avg-sq-dtype to bf16 or fp32, or use expert data parallel size 1"
                    )

    def _remember_step(self, optimizer, args, kwargs) -> None:
        self._stepped = True


def _kinds_of(held: ShardState) -> frozenset[StateKind]:
    elements = {
        StateKind(key, tensor.element_size(), False, key == MAIN and tensor.dtype == torch.int16)
        for key, tensor in held.elements.items()
    }
    factors = {StateKind(key, t.element_size(), True, False) for key, t in held.factors.items()}
    return frozenset(elements | factors)


def _expert_optimizer(model_chunks: Sequence[nn.Module], optimizer) -> DistributedOptimizer | None:
    """The part of a chained optimizer that owns the expert buffers; None if experts are frozen."""
    buffers = {
        id(buffer)
        for chunk in model_chunks
        for buffer in getattr(chunk, "expert_parallel_buffers", [])
    }
    if optimizer is None or not buffers:
        return None
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if any(id(b) in buffers for b in getattr(part, "buffers", [])):
            return part
    raise LayoutError(
        f"{type(optimizer).__name__} has no DistributedOptimizer over the expert buffers: set "
        "--use-distributed-optimizer"
    )
