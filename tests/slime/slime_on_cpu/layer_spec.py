"""`--spec slime_on_cpu.layer_spec get_spec`: Megatron's layers for a CPU, with production names.

Core attention is torch's SDPA per packed sequence, under CP against keys gathered from all ranks;
the experts are Megatron's own TEGroupedMLP over
a grouped linear with TE's parameter names, which slime's weight sync and checkpoints rely on.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import mpu
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


class GatherFromCP(torch.autograd.Function):
    """`[rank, ...]` of all CP ranks; gradients of a rank's part are summed over them."""

    @staticmethod
    def forward(ctx, x):
        group = mpu.get_context_parallel_group()
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, gradient):
        group = mpu.get_context_parallel_group()
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=group)
        return gradient[group.rank()]


def zigzag(length: int, size: int, rank: int) -> torch.Tensor:
    """Positions of a sequence that `rank` holds (slime/backends/megatron_utils/cp_utils.py)."""
    chunk = length // (2 * size)
    first = torch.arange(chunk)
    return torch.cat([first + rank * chunk, first + (2 * size - rank - 1) * chunk])


class PackedAttention(MegatronModule):
    """Causal attention over packed sequences `[token, head, channel]`, one SDPA call each."""

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
        **kwargs,
    ):
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self,
        query,
        key,
        value,
        attention_mask,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
    ):
        size, rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
        lengths = (packed_seq_params.cu_seqlens_q.diff() // size).tolist()
        repeat = query.shape[-2] // key.shape[-2]
        outputs = []
        for parts in zip(query.split(lengths), key.split(lengths), value.split(lengths)):
            q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in parts)
            mask = None
            if size > 1:
                held = [zigzag(size * q.shape[2], size, r) for r in range(size)]
                k, v = (torch.cat(tuple(GatherFromCP.apply(x)), dim=2) for x in (k, v))
                mask = held[rank][:, None] >= torch.cat(held)[None, :]
            k, v = (x.repeat_interleave(repeat, 1) for x in (k, v))
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale
            )
            outputs.append(out.squeeze(0).transpose(0, 1))
        return torch.cat(outputs).flatten(1)


class ColumnGroupedLinear(torch.nn.Module):
    """Transformer Engine's GroupedLinear by its surface: weight0.., forward(x, splits)."""

    axis = 0

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
        is_expert,
        tp_comm_buffer_name=None,
        pg_collection=None,
    ):
        super().__init__()
        assert not bias
        self.num_gemms, self.config, self.groups = num_gemms, config, pg_collection
        for index in range(num_gemms):
            weight = torch.nn.Parameter(
                torch.empty(output_size, input_size, dtype=config.params_dtype)
            )
            init_method(weight.data)
            weight.allreduce = not (is_expert and config.expert_model_parallel_size > 1)
            # As TE marks them: every TP rank counts its own experts in the gradient norm.
            weight.tensor_model_parallel, weight.partition_dim = True, 0
            weight.partition_stride = 1
            self.register_parameter(f"weight{index}", weight)

    def forward(self, x, m_splits):
        parts = enumerate(torch.split(x, [int(m) for m in m_splits]))
        return torch.cat([F.linear(part, getattr(self, f"weight{i}")) for i, part in parts]), None

    def backward_dw(self):
        pass

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        found = {}
        total = self.groups.ep.size() * self.num_gemms
        first = self.groups.ep.rank() * self.num_gemms
        state = self.state_dict(prefix="", keep_vars=True)
        for index in range(self.num_gemms):
            sharded = make_sharded_tensors_for_checkpoint(
                {f"{index}.weight": state[f"weight{index}"]},
                "",
                {f"{index}.weight": self.axis},
                (*sharded_offsets, (len(sharded_offsets), first + index, total)),
                tp_group=self.groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(sharded, f"{index}.", prefix)
            tensor = sharded[f"{index}.weight"]
            tensor.replica_id = (*tensor.replica_id[:2], self.groups.expt_dp.rank())
            found[f"{prefix}weight{index}"] = tensor
        return found


class RowGroupedLinear(ColumnGroupedLinear):
    """The second expert matrix."""

    axis = 1


class NormColumnLinear(ColumnParallelLinear):
    """TE's fused RMSNorm + linear by its parameter names (layer_norm_weight, weight)."""

    def __init__(self, input_size, output_size, *, config, **kwargs):
        super().__init__(input_size, output_size, config=config, **kwargs)
        weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        weight.allreduce = True
        weight.sequence_parallel = config.sequence_parallel
        self.layer_norm_weight, self.eps = weight, config.layernorm_epsilon

    def forward(self, x, *args, **kwargs):
        x = F.rms_norm(x, (x.shape[-1],), self.layer_norm_weight, self.eps)
        return super().forward(x, *args, **kwargs)


class Norm(torch.nn.Module):
    """RMSNorm whose gradient is summed over sequence-parallel ranks; torch's own refuses them."""

    def __init__(self, config, hidden_size, eps=1e-6, **kwargs):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps = eps

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def get_spec(args, config, vp_stage=None):
    """slime's `--spec` seam (backends/megatron_utils/model_provider.py)."""
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)
    spec.layer_norm = Norm
    for layer in spec.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = IdentityOp
        attention = parts.self_attention.submodules
        if attention.q_layernorm is not IdentityOp:
            attention.q_layernorm = attention.k_layernorm = Norm
        attention.linear_qkv = NormColumnLinear
        attention.core_attention = PackedAttention
        if hasattr(parts.mlp.submodules, "experts"):
            parts.pre_mlp_layernorm = Norm
            parts.mlp.submodules.experts = ModuleSpec(
                module=TEGroupedMLP,
                submodules=MLPSubmodules(
                    linear_fc1=ColumnGroupedLinear, linear_fc2=RowGroupedLinear
                ),
            )
        else:  # a dense layer: its norm is fused into the first linear, as with TE
            parts.pre_mlp_layernorm = IdentityOp
            parts.mlp.submodules.linear_fc1 = NormColumnLinear
    return spec
