"""A tiny Ling 2.0 in Megatron: exported as a checkpoint for SGLang, with Megatron's own answer.

The export is the one that slime uses for Ling 2.0 (`app.models.bailing_moe_v2`).
"""

from __future__ import annotations

import app.local.cpu_megatron  # isort: skip  # noqa: F401  before megatron

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from app.config import ModelConfig, RunConfig
from app.config.model import VOCAB_SIZE
from app.local.model import (
    MAX_POSITIONS,
    NORM_EPSILON,
    ROTARY_BASE,
    ROTARY_PERCENT,
    build_megatron,
    megatron_config,
)
from app.local.tokens import EOS, PAD
from app.models.bailing_moe_v2 import export_tensor
from train_hooks.micro_batch import TrainingTrajectory, pack

# Local layer specs keep the norm before attention apart; slime's fuse it into linear_qkv.
FUSED_NORM = ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")


def hf_config(model: ModelConfig) -> dict:
    """The config.json of the tiny Ling 2.0."""
    rope = dict(rope_type="default", rope_theta=ROTARY_BASE, partial_rotary_factor=ROTARY_PERCENT)
    return dict(
        architectures=["BailingMoeV2ForCausalLM"],
        auto_map={"AutoConfig": "configuration_bailing_moe_v2.BailingMoeV2Config"},
        model_type="bailing_moe_v2",
        vocab_size=VOCAB_SIZE,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_hidden_size,
        moe_intermediate_size=model.moe_ffn_hidden_size,
        num_hidden_layers=model.num_layers,
        first_k_dense_replace=model.num_dense_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_query_groups,
        head_dim=model.head_dim,
        num_experts=model.num_experts,
        num_experts_per_tok=model.top_k,
        num_shared_experts=1,
        n_group=model.num_groups,
        topk_group=model.group_top_k,
        routed_scaling_factor=model.routed_scaling_factor,
        moe_router_enable_expert_bias=True,
        score_function="sigmoid",
        router_dtype="fp32",
        norm_topk_prob=True,
        hidden_act="silu",
        use_qk_norm=True,
        use_bias=False,
        use_qkv_bias=False,
        norm_head=False,
        tie_word_embeddings=False,
        embedding_dropout=0.0,
        rms_norm_eps=NORM_EPSILON,
        max_position_embeddings=MAX_POSITIONS,
        rope_theta=ROTARY_BASE,
        rope_parameters=rope,
        partial_rotary_factor=ROTARY_PERCENT,
        pad_token_id=PAD,
        eos_token_id=EOS,
        torch_dtype="float32",
    )


CONFIGURATION = '''"""Configuration class of the checkpoint, loaded with --trust-remote-code."""
from transformers import PretrainedConfig


class BailingMoeV2Config(PretrainedConfig):
    model_type = "bailing_moe_v2"
'''


@torch.no_grad()
def export_ling(config: RunConfig, folder: str, tokens: list[int]) -> dict:
    """Write the checkpoint; return Megatron's log-probs and routing of `tokens`.

    log_probs: `[t-1]` of tokens 1..t-1. routed: bool `[L, t-1, E]`.
    """
    megatron = megatron_config(config.model, 1, add_qkv_bias=False)
    model = build_megatron(megatron).eval()
    routers = {
        number: layer.mlp.router
        for number, layer in enumerate(model.decoder.layers)
        if hasattr(layer.mlp, "router")
    }
    generator = torch.Generator().manual_seed(config.seed)
    tensors = dict(model.named_parameters())
    for number, router in routers.items():
        router._maintain_float32_expert_bias()
        tensors[f"decoder.layers.{number}.mlp.router.expert_bias"] = router.expert_bias
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("expert_bias"):
            tensor.copy_(0.1 * noise)
        elif "norm" in name:
            tensor.copy_(1 + 0.1 * noise)
        else:
            tensor.copy_(noise * tensor.shape[-1] ** -0.5)
    exported: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        exported.update(export_tensor(config.model, name.replace(*FUSED_NORM), tensor))
    save_file({n: t.detach().clone() for n, t in exported.items()}, f"{folder}/model.safetensors")
    Path(folder, "config.json").write_text(json.dumps(hf_config(config.model)))
    Path(folder, "configuration_bailing_moe_v2.py").write_text(CONFIGURATION)

    routed: dict[int, torch.Tensor] = {}
    for number, router in routers.items():
        router.register_forward_hook(
            lambda router, args, output, number=number: routed.__setitem__(number, output[1])
        )
    batch = pack(
        0, [TrainingTrajectory(tokens=torch.tensor(tokens), routed=None, counts=None, targets={})]
    )
    negative = model(
        batch.tokens, batch.position_ids, None, labels=batch.labels, packed_seq_params=batch.packed
    )
    return {
        "log_probs": -negative[0].numpy(),
        "routed": torch.stack([routed[number] for number in routers]).numpy(),
    }
