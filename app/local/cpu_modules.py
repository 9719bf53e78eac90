"""CPU modules that plug into Megatron's layer specs: packed attention and the grouped linear."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import _initialize_affine_weight_gpu
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.nn import Parameter


class PackedAttention(MegatronModule):
    """Causal core attention by torch SDPA: one call for bshd, one per packed sequence for thd."""

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        attention_dropout=None,
        softmax_scale=None,
        cp_comm_type=None,
        pg_collection=None,
    ):
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        assert dropout == 0
        self.scale = softmax_scale
        self.num_parts = config.context_parallel_size

    def forward(
        self,
        query,
        key,
        value,
        attention_mask=None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
    ):
        if packed_seq_params is None:  # [position, batch, head, channel]
            q, k, v = (x.transpose(0, 1) for x in (query, key, value))
            out = self._attend(q, k, v).transpose(0, 1)
            return out.reshape(query.size(0), query.size(1), -1)
        # thd: [token, head, channel]
        lengths = (packed_seq_params.cu_seqlens_q.diff() // self.num_parts).tolist()
        if self.num_parts > 1:
            return self._attend_across_parts(query, key, value, lengths)
        parts = zip(query.split(lengths), key.split(lengths), value.split(lengths))
        return torch.cat([self._attend(q[None], k[None], v[None])[0] for q, k, v in parts])

    def _attend_across_parts(self, query, key, value, lengths):
        """Context parallelism: gather keys and values, mask by position (zigzag parts, as Megatron
        cuts them: of 2 x CP blocks rank r holds block r and block 2 x CP - 1 - r)."""
        group = mpu.get_context_parallel_group()
        rank, size = group.rank(), group.size()
        keys, values = (
            torch.stack(gather_from_sequence_parallel_region(x, group=group).chunk(size))
            for x in (key, value)
        )
        outputs, start = [], 0
        for length in lengths:
            mine = slice(start, start + length)
            block = torch.arange(length // 2)
            positions = [
                torch.cat([block + r * len(block), block + (2 * size - 1 - r) * len(block)])
                for r in range(size)
            ]
            mask = positions[rank][:, None] >= torch.cat(positions)[None]
            k, v = (x[:, mine].flatten(0, 1)[None] for x in (keys, values))
            outputs.append(self._attend(query[None, mine], k, v, mask)[0])
            start += length
        return torch.cat(outputs)

    def _attend(self, q, k, v, mask=None):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if k.size(1) != q.size(1):
            k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale
        )
        return out.transpose(1, 2)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        return {}


class GroupedLinear(torch.nn.Module):
    """Transformer Engine's GroupedLinear by its surface: weight0.., forward(x, splits)."""

    partition_dim: int

    def __init__(
        self,
        num_gemms,
        input_size,
        output_size,
        *,
        config,
        init_method,
        bias,
        skip_bias_add,
        is_expert=False,
        tp_comm_buffer_name=None,
        pg_collection=None,
    ):
        super().__init__()
        assert not bias and is_expert and pg_collection.expt_tp.size() == 1
        self.num_gemms = num_gemms
        self.groups = pg_collection
        for index in range(num_gemms):
            weight = Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
            _initialize_affine_weight_gpu(
                weight, init_method, partition_dim=self.partition_dim, is_expert=True
            )
            weight.allreduce = config.expert_model_parallel_size == 1
            self.register_parameter(f"weight{index}", weight)

    def forward(self, x, m_splits):
        parts = enumerate(x.split(list(m_splits)))
        return torch.cat([F.linear(part, getattr(self, f"weight{i}")) for i, part in parts]), None

    def backward_dw(self):
        pass

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """One entry a local expert under its global index, as TEGroupedLinear has them."""
        num_experts = self.groups.ep.size() * self.num_gemms
        first = self.groups.ep.rank() * self.num_gemms
        state = {}
        for index in range(self.num_gemms):
            offsets = (*sharded_offsets, (len(sharded_offsets), first + index, num_experts))
            entry = make_sharded_tensors_for_checkpoint(
                {"weight": getattr(self, f"weight{index}")},
                "",
                {"weight": self.partition_dim},
                offsets,
                tp_group=self.groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )["weight"]
            entry.key = f"{prefix}weight"
            entry.replica_id = (*entry.replica_id[:2], self.groups.expt_dp.rank())
            state[f"{prefix}weight{index}"] = entry
        return state


class ColumnGroupedLinear(GroupedLinear):
    """First expert matrix, split over its output under expert tensor parallelism."""

    partition_dim = 0


class RowGroupedLinear(GroupedLinear):
    """Second expert matrix, split over its input under expert tensor parallelism."""

    partition_dim = 1


class SequenceParallelRMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose weight gradient Megatron sums over the TP ranks' parts of the sequence."""

    def __init__(self, config, hidden_size, eps=1e-5, **unused):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


EXPERT_LINEARS = (ColumnGroupedLinear, RowGroupedLinear)


def use_cpu_modules(
    layer_spec, sequence_parallel: bool = False, expert_linears: tuple[type, type] = EXPERT_LINEARS
) -> None:
    """Edit one transformer layer spec in place to use the modules above.

    expert_linears: the first and second linear layer of experts.
    """
    submodules = layer_spec.submodules
    if sequence_parallel:
        attention = submodules.self_attention.submodules
        submodules.input_layernorm = submodules.pre_mlp_layernorm = SequenceParallelRMSNorm
        attention.q_layernorm = attention.k_layernorm = SequenceParallelRMSNorm
    submodules.self_attention.submodules.core_attention = PackedAttention
    if hasattr(submodules.mlp.submodules, "experts"):
        submodules.mlp.submodules.experts = ModuleSpec(
            module=TEGroupedMLP,
            submodules=MLPSubmodules(linear_fc1=expert_linears[0], linear_fc2=expert_linears[1]),
        )
