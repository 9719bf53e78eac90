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

MATRICES = ("linear_fc1", "linear_fc2")


def expert_parameters(layer: MoELayer) -> list[list[nn.Parameter]]:
    """Return the parameters of each local expert, `[local expert][matrix]`.

    Raises LayoutError for expert modules without the production names `linear_fc1.weight{i}`.
    """
    experts = layer.experts
    if not isinstance(experts, TEGroupedMLP):
        raise LayoutError(
            f"{type(experts).__name__} is not supported: RoutePack moves TEGroupedMLP experts "
            "(linear_fc1.weight0, ...); set --moe-grouped-gemm with Transformer Engine"
        )
    return [
        [getattr(getattr(experts, matrix), f"weight{index}") for matrix in MATRICES]
        for index in range(experts.num_local_experts)
    ]


class ExpertState:
    """Address book of expert state over the EP x EDP ranks of one pipeline stage.

    Shapes are flat element ranges inside one expert matrix. Every rank computes every rank's
    ranges locally, because the buffers of all EP ranks have the same layout.

    Source: `param_index_map` and buckets of `_ParamAndGradBuffer`, shard sizes and state access
    of `DistributedOptimizer` (megatron/core/optimizer/distrib_optimizer.py).
    """

    def __init__(self, model_chunks: Sequence[nn.Module], optimizer, layout: ExpertLayout):
        self.model_chunks = list(model_chunks)
        self.parameters = {n: expert_parameters(layer) for n, layer in layout.layers.items()}
        self._address = {
            param: (start, buffer.buckets[bucket])
            for chunk in model_chunks
            for buffer in chunk.expert_parallel_buffers
            for param, (start, _, bucket) in buffer.param_index_map.items()
        }
        self.optimizer = _expert_optimizer(model_chunks, optimizer)
        if mpu.get_expert_tensor_parallel_world_size() != 1:
            raise LayoutError(
                "expert tensor parallel size "
                f"{mpu.get_expert_tensor_parallel_world_size()} is not supported: set "
                "--expert-tensor-parallel-size 1"
            )
        self.num_edp_ranks = mpu.get_expert_data_parallel_world_size()
        self.ep_rank = mpu.get_expert_model_parallel_rank()
        self.edp_rank = mpu.get_expert_data_parallel_rank()
        mine = torch.tensor([self.ep_rank, self.edp_rank], dtype=torch.int64)
        gathered = [torch.empty_like(mine) for _ in range(self.group.size())]
        dist.all_gather(gathered, mine, group=self.group)
        self.rank_in_group = {tuple(c.tolist()): rank for rank, c in enumerate(gathered)}

    @property
    def group(self) -> dist.ProcessGroup:
        """The existing group over EP x EDP of this stage (all of TP x CP x DP with ETP 1)."""
        return mpu.get_tensor_and_data_parallel_group(with_context_parallel=True)

    def wait_for_parameters(self) -> None:
        """Finish parameter gathers that overlap_param_gather left pending."""
        for chunk in self.model_chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def owners(self, param: nn.Parameter) -> Iterator[tuple[int, int, int]]:
        """Yield (EDP rank, start, stop): who owns which flat range in its optimizer shard."""
        param_start, bucket = self._address[param]
        shard = bucket.grad_data.numel() // self.num_edp_ranks
        for rank in range(self.num_edp_ranks):
            low = max(param_start, bucket.offset + rank * shard)
            high = min(param_start + param.numel(), bucket.offset + (rank + 1) * shard)
            if low < high:
                yield rank, low - param_start, high - param_start

    def optimizer_keys(self) -> tuple[str, ...]:
        """Names of the optimizer tensors to move: the fp32 main copy and the Adam moments.

        With fp32 parameters the main shard is a view of the model parameter and is left out.
        Before the first optimizer step there are no moments.
        """
        if self.optimizer is None:
            return ()
        first = next(iter(self._address))
        main = () if first.dtype == torch.float32 else ("param",)
        has_moments = any("exp_avg" in state for state in self.optimizer.optimizer.state.values())
        return main + (("exp_avg", "exp_avg_sq") if has_moments else ())

    def optimizer_shard(self, param: nn.Parameter, key: str) -> tuple[int, torch.Tensor]:
        """Return (offset in `param`, flat tensor to read or write in place) of this rank."""
        tensors = self.optimizer._get_main_param_and_optimizer_states(param)
        offset = self.optimizer._get_model_param_range_map(param)["param"].start
        return offset, tensors[key].detach().view(-1)


def _expert_optimizer(model_chunks: Sequence[nn.Module], optimizer) -> DistributedOptimizer | None:
    if optimizer is None:
        return None
    buffers = {id(b) for chunk in model_chunks for b in chunk.expert_parallel_buffers}
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if any(id(b) in buffers for b in getattr(part, "buffers", [])):
            return part
    raise LayoutError(
        f"{type(optimizer).__name__} has no DistributedOptimizer over the expert buffers: set "
        "--use-distributed-optimizer"
    )
