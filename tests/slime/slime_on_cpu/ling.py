"""A tiny Ling 2.0 (`bailing_moe_v2`): checkpoint with its configuration class, and arguments."""

from __future__ import annotations

import json
from pathlib import Path

import torch

CONFIG = dict(
    architectures=["BailingMoeV2ForCausalLM"],
    model_type="bailing_moe_v2",
    auto_map={"AutoConfig": "configuration_bailing_moe_v2.BailingMoeV2Config"},
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    moe_intermediate_size=32,
    num_experts=16,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    num_shared_experts=1,
    first_k_dense_replace=1,
    rms_norm_eps=1e-6,
    rope_theta=10000,
    partial_rotary_factor=0.5,
    routed_scaling_factor=2.5,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
)
CLASS = """from transformers import PretrainedConfig


class BailingMoeV2Config(PretrainedConfig):
    model_type = "bailing_moe_v2"

    def __init__(self, **kwargs):
        for key, value in kwargs.items():
            setattr(self, key, value)
        super().__init__(**kwargs)
"""


def make_checkpoint(folder: Path) -> None:
    """Write configuration, its class, weights and tokenizer."""
    from safetensors.torch import save_file

    from slime_on_cpu.make_inputs import _make_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "configuration_bailing_moe_v2.py").write_text(CLASS)
    torch.manual_seed(0)
    c = CONFIG
    hidden, heads, groups = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
    channel = c["head_dim"]
    random = lambda *shape: (torch.randn(*shape) * 0.05).bfloat16()
    ones = lambda size: torch.ones(size).bfloat16()
    state = {
        "model.word_embeddings.weight": random(c["vocab_size"], hidden),
        "lm_head.weight": random(c["vocab_size"], hidden),
        "model.norm.weight": ones(hidden),
    }
    for layer in range(c["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        state |= {
            p + "input_layernorm.weight": ones(hidden),
            p + "post_attention_layernorm.weight": ones(hidden),
            p + "attention.query_key_value.weight": random((heads + 2 * groups) * channel, hidden),
            p + "attention.query_layernorm.weight": ones(channel),
            p + "attention.key_layernorm.weight": ones(channel),
            p + "attention.dense.weight": random(hidden, heads * channel),
        }
        ffns = {"mlp.": c["intermediate_size"]}
        if layer >= c["first_k_dense_replace"]:
            width = c["moe_intermediate_size"]
            ffns = {f"mlp.experts.{e}.": width for e in range(c["num_experts"])}
            ffns["mlp.shared_experts."] = width * c["num_shared_experts"]
            state[p + "mlp.gate.weight"] = random(c["num_experts"], hidden)
            state[p + "mlp.gate.expert_bias"] = torch.randn(c["num_experts"]) * 0.01
        for ffn, width in ffns.items():
            state |= {
                p + ffn + "gate_proj.weight": random(width, hidden),
                p + ffn + "up_proj.weight": random(width, hidden),
                p + ffn + "down_proj.weight": random(hidden, width),
            }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    _make_tokenizer(folder)


def arguments(inputs: Path, ling: Path) -> list[str]:
    """The tiny job's command line with Ling's model arguments in place of Qwen3-MoE's."""
    from app.models.bailing_args import model_args
    from slime_on_cpu.make_inputs import arguments as qwen

    base = " ".join(qwen(inputs))
    for flag in (
        "--num-layers 2",
        "--hidden-size 64",
        "--num-attention-heads 4",
        "--num-query-groups 2",
        "--kv-channels 16",
        "--ffn-hidden-size 128",
        "--moe-ffn-hidden-size 32",
        "--num-experts 8",
        "--moe-router-topk 2",
        "--rotary-base 10000",
        "--vocab-size 256",
        "--use-rollout-routing-replay",
        "--use-kl-loss",
        "--kl-loss-coef 0.01",
        "--kl-loss-type low_var_kl",
    ):
        base = base.replace(flag, "")
    return [*base.replace(f"{inputs}/hf", str(ling)).split(), *model_args(CONFIG)]
