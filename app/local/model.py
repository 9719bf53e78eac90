"""One small GLM-4-MoE for two engines: transformers samples with it, Megatron trains it."""

from __future__ import annotations

import app.local.cpu_megatron  # isort: skip  # noqa: F401  before megatron and transformers

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer import TransformerConfig
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from app.config import ModelConfig, RoutingSkewConfig
from app.config.model import VOCAB_SIZE
from app.local.cpu_modules import EXPERT_LINEARS, SequenceParallelRMSNorm, use_cpu_modules
from app.local.tokens import BOS, EOS, PAD

MAX_POSITIONS = 4096
ROTARY_PERCENT = 0.5
ROTARY_BASE = 10_000.0
NORM_EPSILON = 1e-5


def hf_config(model: ModelConfig) -> Glm4MoeConfig:
    """The transformers configuration of `model`."""
    return Glm4MoeConfig(
        num_hidden_layers=model.num_layers,
        first_k_dense_replace=model.num_dense_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_query_groups,
        head_dim=model.head_dim,
        intermediate_size=model.ffn_hidden_size,
        moe_intermediate_size=model.moe_ffn_hidden_size,
        n_routed_experts=model.num_experts,
        num_experts_per_tok=model.top_k,
        n_group=model.num_groups,
        topk_group=model.group_top_k if model.num_groups > 1 else 1,
        n_shared_experts=1,
        norm_topk_prob=True,
        routed_scaling_factor=model.routed_scaling_factor,
        use_qk_norm=True,
        attention_bias=True,
        vocab_size=VOCAB_SIZE,
        tie_word_embeddings=False,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=NORM_EPSILON,
        num_mtp_layers=0,
        rope_parameters=dict(
            rope_type="default", rope_theta=ROTARY_BASE, partial_rotary_factor=ROTARY_PERCENT
        ),
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )


def build_hf(model: ModelConfig, skew: RoutingSkewConfig, seed: int) -> Glm4MoeForCausalLM:
    """A seeded fp32 model with `skew` in its routers."""
    config = hf_config(model)
    hf = Glm4MoeForCausalLM._from_config(
        config,
        attn_implementation="sdpa",
        experts_implementation="grouped_mm",
        dtype=torch.float32,
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in hf.named_parameters():
            if "norm" in name:
                tensor.fill_(1.0)
            elif name.endswith("bias"):
                tensor.zero_()
            else:
                scale = 0.5 if "embed_tokens" in name else tensor.shape[-1] ** -0.5
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale)
    set_routing_skew(hf, skew)
    return hf


def set_routing_skew(hf: Glm4MoeForCausalLM, skew: RoutingSkewConfig) -> None:
    """Write the seeded offset into every router's score correction bias."""
    generator = torch.Generator().manual_seed(skew.seed)
    for layer in hf.model.layers:
        if hasattr(layer.mlp, "gate"):
            bias = layer.mlp.gate.e_score_correction_bias
            bias.copy_(torch.randn(bias.shape, generator=generator) * skew.expert_bias_std)


def megatron_config(model: ModelConfig, expert_parallel_size: int, **changes) -> TransformerConfig:
    """The TransformerConfig equal to `hf_config(model)`; `changes` override single fields."""
    grouped = model.num_groups > 1
    fields = dict(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.ffn_hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=NORM_EPSILON,
        qk_layernorm=True,
        add_bias_linear=False,
        add_qkv_bias=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        rotary_interleaved=False,
        num_moe_experts=model.num_experts,
        moe_layer_freq=[int(i >= model.num_dense_layers) for i in range(model.num_layers)],
        moe_ffn_hidden_size=model.moe_ffn_hidden_size,
        moe_shared_expert_intermediate_size=model.moe_ffn_hidden_size,
        moe_grouped_gemm=True,
        moe_token_dispatcher_type="alltoall",
        moe_router_topk=model.top_k,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=0.0,
        moe_router_dtype="fp32",
        moe_router_topk_scaling_factor=model.routed_scaling_factor,
        moe_router_num_groups=model.num_groups if grouped else None,
        moe_router_group_topk=model.group_top_k if grouped else None,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_enable_routing_replay=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        bf16=False,
        expert_model_parallel_size=expert_parallel_size,
        expert_tensor_parallel_size=1,
    )
    return TransformerConfig(**{**fields, **changes})


def build_megatron(
    config: TransformerConfig,
    vp_stage: int | None = None,
    expert_linears: tuple[type, type] = EXPERT_LINEARS,
) -> GPTModel:
    """This rank's GPTModel chunk of `config`, with CPU attention and grouped linear in its spec."""
    config.moe_grouped_gemm = False  # the local spec's own grouped MLP needs grouped_gemm
    spec = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=False,
        normalization=config.normalization,
        vp_stage=vp_stage,
    )
    config.moe_grouped_gemm = True
    for layer_spec in {id(s): s for s in spec.layer_specs}.values():
        use_cpu_modules(layer_spec, config.sequence_parallel, expert_linears)
    if config.sequence_parallel:
        spec.layer_norm = SequenceParallelRMSNorm
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCAB_SIZE,
        max_sequence_length=MAX_POSITIONS,
        position_embedding_type="rope",
        rotary_percent=ROTARY_PERCENT,
        rotary_base=ROTARY_BASE,
        share_embeddings_and_output_weights=False,
        mtp_block_spec=_mtp_spec(config, spec, vp_stage) if config.mtp_num_layers else None,
        pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        vp_stage=vp_stage,
    )


def _mtp_spec(config: TransformerConfig, decoder, vp_stage: int | None):
    return get_gpt_mtp_block_spec(config, decoder, use_transformer_engine=False, vp_stage=vp_stage)
