"""Ling 2.0 for slime (`bailing_moe_v2`: Ling-mini-2.0, Ring-mini-2.0, Ling-flash-2.0).

Megatron <-> Hugging Face by parameter name, as plug-ins to slime's two tables:
`hf_to_megatron._LOADERS` (by model_type) and `megatron_to_hf._convert_to_hf_core` (by model name).
The checkpoint keeps attention fused as rows [all q heads | k heads | v heads]; Megatron keeps them
by query group, [group: its q heads, k, v]. Its MTP layers are neither loaded nor exported.
"""

from __future__ import annotations

import re
from typing import Any

import torch

MODEL_TYPE = "bailing_moe_v2"
WHOLE = {
    "embedding.word_embeddings.weight": "model.word_embeddings.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
LAYER = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "attention.dense.weight",
    "self_attention.q_layernorm.weight": "attention.query_layernorm.weight",
    "self_attention.k_layernorm.weight": "attention.key_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.expert_bias",
}
QKV = "self_attention.linear_qkv.weight"
FUSED = "attention.query_key_value.weight"
_LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_FFN = re.compile(r"mlp\.(experts\.|shared_experts\.|)linear_fc([12])\.weight(\d*)")


def split_name(name: str) -> tuple[str | None, str]:
    """(layer, rest) of a Megatron parameter name, wrappers stripped; layer None outside layers."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    match = _LAYER_NAME.fullmatch(name)
    return (match[1], match[2]) if match else (None, name)


def ffn_prefix(rest: str) -> tuple[str, str] | None:
    """(Hugging Face prefix, '1' or '2') of an expert, shared-expert or dense FFN matrix."""
    match = _FFN.fullmatch(rest)
    if match is None:
        return None
    kind, matrix, expert = match.groups()
    return f"mlp.{kind}{expert}." if expert else f"mlp.{kind}", matrix


def group_qkv(fused: torch.Tensor, num_heads: int, num_groups: int) -> torch.Tensor:
    """[q | k | v] rows -> [group: q heads, k, v] rows; `[(heads + 2 groups) x channel, hidden]`."""
    heads = fused.view(num_heads + 2 * num_groups, -1, fused.shape[-1])
    q, k, v = heads.split([num_heads, num_groups, num_groups])
    q = q.view(num_groups, num_heads // num_groups, *q.shape[1:])
    return torch.cat([q, k[:, None], v[:, None]], dim=1).reshape(fused.shape).contiguous()


def ungroup_qkv(grouped: torch.Tensor, num_heads: int, num_groups: int) -> torch.Tensor:
    """The inverse of `group_qkv`."""
    per_group = num_heads // num_groups + 2
    channel = grouped.shape[0] // (num_groups * per_group)
    heads = grouped.view(num_groups, per_group, channel, grouped.shape[-1])
    q, k, v = heads.split([per_group - 2, 1, 1], dim=1)
    return torch.cat([part.reshape(-1, grouped.shape[-1]) for part in (q, k, v)]).contiguous()


def load_tensor(name: str, reader: Any, config: Any) -> torch.Tensor:
    """One Megatron tensor from the checkpoint; the signature of slime's loaders.

    reader: `get_tensor(hf_name)`. Raises KeyError for a parameter that Ling 2.0 does not have.
    """
    layer, rest = split_name(name)
    if layer is None:
        if rest == "output_layer.weight" and getattr(config, "tie_word_embeddings", False):
            return reader.get_tensor(WHOLE["embedding.word_embeddings.weight"])
        if rest in WHOLE:
            return reader.get_tensor(WHOLE[rest])
        raise KeyError(f"Ling 2.0 has no Megatron parameter {name!r}")
    prefix = f"model.layers.{layer}."
    if rest in LAYER:
        return reader.get_tensor(prefix + LAYER[rest])
    if rest == QKV:
        fused = reader.get_tensor(prefix + FUSED)
        return group_qkv(fused, config.num_attention_heads, config.num_key_value_heads)
    found = ffn_prefix(rest)
    if found is None:
        raise KeyError(f"Ling 2.0 has no Megatron parameter {name!r}")
    ffn, matrix = found
    if matrix == "2":
        return reader.get_tensor(f"{prefix}{ffn}down_proj.weight")
    halves = [reader.get_tensor(f"{prefix}{ffn}{half}_proj.weight") for half in ("gate", "up")]
    return torch.cat(halves)


def export_tensor(args: Any, name: str, param: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """One whole Megatron tensor under its Hugging Face names; the signature of slime's exporters.

    args: slime's namespace. Raises ValueError for a parameter that Ling 2.0 does not have.
    """
    layer, rest = split_name(name)
    if layer is None and rest in WHOLE:
        return [(WHOLE[rest], param)]
    prefix = f"model.layers.{layer}."
    if layer is not None and rest in LAYER:
        return [(prefix + LAYER[rest], param)]
    if layer is not None and rest == QKV:
        fused = ungroup_qkv(param, args.num_attention_heads, args.num_query_groups)
        return [(prefix + FUSED, fused)]
    found = None if layer is None else ffn_prefix(rest)
    if found is None:
        raise ValueError(f"Ling 2.0 has no Megatron parameter {name!r}")
    ffn, matrix = found
    if matrix == "2":
        return [(f"{prefix}{ffn}down_proj.weight", param)]
    gate, up = param.chunk(2, dim=0)
    return [(f"{prefix}{ffn}gate_proj.weight", gate), (f"{prefix}{ffn}up_proj.weight", up)]


def register() -> None:
    """Put both functions into slime's tables of this process; safe to repeat."""
    from slime.backends.megatron_utils import hf_to_megatron, megatron_to_hf

    hf_to_megatron._LOADERS[MODEL_TYPE] = load_tensor
    known = megatron_to_hf._convert_to_hf_core
    if getattr(known, "knows_bailing", False):
        return

    def convert(args: Any, model_name: str, name: str, param: torch.Tensor):
        plain = model_name.lower().replace("_", "").replace("-", "")
        if "bailingmoev2" in plain:
            return export_tensor(args, name, param)
        return known(args, model_name, name, param)

    convert.knows_bailing = True  # type: ignore[attr-defined]
    megatron_to_hf._convert_to_hf_core = convert
