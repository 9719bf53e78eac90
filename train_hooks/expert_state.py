"""Where the state of every local expert lives: parameters, fp32 main shards, Adam moments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import nn

from train_hooks.layout import ExpertLayout, LayoutError
from train_hooks.optimizer_state import MOMENTS, shard_offset, shard_tensors

MATRICES = ("linear_fc1", "linear_fc2")


def expert_parameters(layer: MoELayer) -> list[list[nn.Parameter]]:
    """Return the parameters of each local expert, `[local expert][matrix]`.

    Raises LayoutError for expert modules without the production names `linear_fc1.weight{i}`, for
    parameters in 8-bit formats, whose scales would stay behind, and for experts of a layer of which
    only some are frozen: freezing by name freezes slots, and experts change slots.
    """
    experts = layer.experts
    if not isinstance(experts, TEGroupedMLP):
        raise LayoutError(
            f"{type(experts).__name__} is not supported: RoutePack moves TEGroupedMLP experts "
            "(linear_fc1.weight0, ...); set --moe-grouped-gemm with Transformer Engine"
        )
    parameters = [
        [getattr(getattr(experts, matrix), f"weight{index}") for matrix in MATRICES]
        for index in range(experts.num_local_experts)
    ]
    _refuse_partly_frozen(parameters)
    for param in parameters[0]:
        if type(param) not in (nn.Parameter, torch.Tensor):
            raise LayoutError(
                f"expert parameters of class {type(param).__name__}, nominally {param.dtype}, keep "
                "their values in a storage of their own, which would stay behind; keep parameters "
                "in bf16 (no --fp8-param-gather; blockwise fp8 compute on bf16 parameters is fine)"
            )
        if param.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise LayoutError(
                f"expert parameters of type {param.dtype} are not supported: their scales would "
                "not move; keep parameters in bf16 (no --fp8-param-gather)"
            )
    return parameters


def _refuse_partly_frozen(parameters: list[list[nn.Parameter]]) -> None:
    for matrix, of_experts in zip(MATRICES, zip(*parameters)):
        frozen = [index for index, param in enumerate(of_experts) if not param.requires_grad]
        if 0 < len(frozen) < len(of_experts):
            raise LayoutError(
                f"{matrix}.weight{{i}} is frozen for local experts {frozen} and trained for the "
                "others: a name freezes a slot, and experts change slots. Freeze all experts of a "
                "layer or none, or use --routepack-policy reschedule"
            )


class ExpertState:
    """Address book of expert state over the EP x EDP ranks of one pipeline stage.

    Shapes are flat element ranges inside one expert matrix. Every rank computes every rank's
    ranges locally, because the buffers of all EP ranks have the same layout. `optimizer` is None
    for a model that is only evaluated; frozen experts have parameters and nothing else.

    Source: `param_index_map` and buckets of `_ParamAndGradBuffer`, shard sizes of
    `DistributedOptimizer` (megatron/core/optimizer/distrib_optimizer.py).
    """

    def __init__(self, model_chunks: Sequence[nn.Module], optimizer, layout: ExpertLayout):
        self.model_chunks = list(model_chunks)
        self.parameters = {n: expert_parameters(layer) for n, layer in layout.layers.items()}
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
        self._all_keys: tuple[str, ...] | None = None
        self.num_edp_ranks = mpu.get_expert_data_parallel_world_size()
        self._owners = {
            id(param): tuple(self._owned_ranges(param, start, bucket))
            for param, (start, bucket) in self._address.items()
            if self.optimizer is not None
        }
        self.ep_rank = mpu.get_expert_model_parallel_rank()
        self.edp_rank = mpu.get_expert_data_parallel_rank()
        mine = (self.ep_rank, self.edp_rank)
        everyone: list = [None] * self.group.size()
        dist.all_gather_object(everyone, mine, group=self.group)
        self.rank_in_group = {place: rank for rank, place in enumerate(everyone)}

    @property
    def group(self) -> dist.ProcessGroup:
        """The existing group over EP x EDP of this stage (all of TP x CP x DP with ETP 1)."""
        return mpu.get_tensor_and_data_parallel_group(with_context_parallel=True)

    def wait_for_parameters(self) -> None:
        """Finish parameter gathers that overlap_param_gather left pending."""
        for chunk in self.model_chunks:
            config = getattr(chunk, "ddp_config", None)
            if config is not None and config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def owners(self, param: nn.Parameter) -> tuple[tuple[int, int, int], ...]:
        """Return (EDP rank, start, stop) of each owner: its flat range in its optimizer shard."""
        return self._owners.get(id(param), ())

    def _owned_ranges(
        self, param: nn.Parameter, param_start: int, bucket
    ) -> Iterator[tuple[int, int, int]]:
        shard = bucket.grad_data.numel() // self.num_edp_ranks
        for rank in range(self.num_edp_ranks):
            low = max(param_start, bucket.offset + rank * shard)
            high = min(param_start + param.numel(), bucket.offset + (rank + 1) * shard)
            if low < high:
                yield rank, low - param_start, high - param_start

    def optimizer_keys(self) -> tuple[str, ...]:
        """Names of the optimizer tensors that exist on any rank; collective over `group`.

        A rank without a local shard cannot see them, yet must enumerate the same pieces. They are
        all there from the first step on, and then not asked for again.
        """
        if self._all_keys is not None:
            return self._all_keys
        mine: set[str] = set()
        if self.optimizer is not None:
            for param in self._address:
                mine |= shard_tensors(self.optimizer, param).keys()
        everyone: list = [None] * self.group.size()
        dist.all_gather_object(everyone, sorted(mine), group=self.group)
        keys = tuple(sorted(set().union(*everyone)))
        if set(MOMENTS) <= set(keys):
            self._all_keys = keys
        return keys

    def optimizer_shard(self, param: nn.Parameter, key: str) -> tuple[int, torch.Tensor]:
        """Return (offset in `param`, flat tensor to read or write in place) of this rank."""
        offset, tensors = self.optimizer_shards(param)
        return offset, tensors[key]

    def optimizer_shards(self, param: nn.Parameter) -> tuple[int, dict[str, torch.Tensor]]:
        """Return (offset in `param`, every flat tensor of this rank's shard by name)."""
        return shard_offset(self.optimizer, param), shard_tensors(self.optimizer, param)


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
