"""Weights between transformers' Glm4Moe and Megatron's GPTModel, by logical expert id."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from app.config import ModelConfig
from train_hooks.expert_state import ExpertState
from train_hooks.layout import ExpertLayout
from train_hooks.logical_names import gather_experts, scatter_experts
from train_hooks.moe_layers import unwrap

WHOLE_MODEL = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
ONE_TO_ONE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.shared_experts.linear_fc2.weight": "mlp.shared_experts.down_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
}
GATE_AND_UP = {
    "mlp.linear_fc1.weight": "mlp.{}_proj.weight",
    "mlp.shared_experts.linear_fc1.weight": "mlp.shared_experts.{}_proj.weight",
}
EXPERTS = {
    "linear_fc1.weight": "mlp.experts.gate_up_proj",
    "linear_fc2.weight": "mlp.experts.down_proj",
}
LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
QKV_NAME = re.compile(r"self_attention\.linear_qkv\.(weight|bias)")
EXPERT_NAME = re.compile(r"mlp\.experts\.linear_fc[12]\.weight\d+")


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightBridge:
    """Both directions between one GPTModel and transformers' names.

    Expert tensors go through the layout, so that no reader or writer outside sees a slot.
    """

    config: ModelConfig
    model: nn.Module
    layout: ExpertLayout
    state: ExpertState

    @torch.no_grad()
    def load(self, source: Mapping[str, torch.Tensor]) -> None:
        """Copy transformers' tensors into the model; raises ValueError for a wrong shape."""
        for layer in self.layout.layers.values():
            layer.router._maintain_float32_expert_bias()
        for name, tensor in self._dense_tensors().items():
            value = self._from_hf(name, source)
            if value.shape != tensor.shape:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}, the checkpoint gives "
                    f"{tuple(value.shape)}: train and sample with the same model configuration"
                )
            tensor.copy_(value)
        for number in self.layout.layer_numbers:
            for name, hf_name in EXPERTS.items():
                tensor = source[f"model.layers.{number}.{hf_name}"]
                scatter_experts(self.layout, self.state, number, name, tensor)

    @torch.no_grad()
    def export(
        self, value: Callable[[nn.Parameter], torch.Tensor | None] = lambda param: param.data
    ) -> dict[str, torch.Tensor]:
        """Return copies under transformers' names on every rank; collective over the EP group.

        `value` picks what to export of a parameter, such as its `main_grad`; None leaves it out.
        """
        exported: dict[str, torch.Tensor] = {}
        for name, tensor in self._dense_tensors().items():
            picked = value(tensor)
            if picked is not None:
                exported.update(self._to_hf(name, picked))
        for number, owned, tensor in gather_experts(self.layout, self.state, value):
            exported[f"model.layers.{number}.{EXPERTS[owned]}"] = tensor
        return {name: tensor.detach().clone() for name, tensor in exported.items()}

    def _dense_tensors(self) -> dict[str, torch.Tensor]:
        model = unwrap(self.model)
        tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
        tensors.update((n, b) for n, b in model.named_buffers() if n.endswith("expert_bias"))
        return {n: t for n, t in tensors.items() if not EXPERT_NAME.search(n)}

    def _from_hf(self, name: str, source: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if name in WHOLE_MODEL:
            return source[WHOLE_MODEL[name]]
        layer, rest = LAYER_NAME.fullmatch(name).groups()
        prefix = f"model.layers.{layer}."
        if rest in ONE_TO_ONE:
            return source[prefix + ONE_TO_ONE[rest]]
        if rest in GATE_AND_UP:
            names = [prefix + GATE_AND_UP[rest].format(part) for part in ("gate", "up")]
            return torch.cat([source[n] for n in names])
        kind = QKV_NAME.fullmatch(rest)[1]
        parts = [source[f"{prefix}self_attn.{x}_proj.{kind}"] for x in "qkv"]
        return merge_qkv(*parts, self.config.num_query_groups)

    def _to_hf(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if name in WHOLE_MODEL:
            return {WHOLE_MODEL[name]: tensor}
        layer, rest = LAYER_NAME.fullmatch(name).groups()
        prefix = f"model.layers.{layer}."
        if rest in ONE_TO_ONE:
            return {prefix + ONE_TO_ONE[rest]: tensor}
        if rest in GATE_AND_UP:
            names = [prefix + GATE_AND_UP[rest].format(part) for part in ("gate", "up")]
            return dict(zip(names, tensor.chunk(2)))
        kind = QKV_NAME.fullmatch(rest)[1]
        names = [f"{prefix}self_attn.{x}_proj.{kind}" for x in "qkv"]
        return dict(zip(names, split_qkv(tensor, self.config)))


def merge_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Megatron's rows: per query group its query heads, then its key, then its value."""
    parts = [x.reshape(num_groups, -1, *x.shape[1:]) for x in (q, k, v)]
    return torch.cat(parts, dim=1).reshape(-1, *q.shape[1:])


def split_qkv(tensor: torch.Tensor, config: ModelConfig) -> list[torch.Tensor]:
    """Undo `merge_qkv`."""
    grouped = tensor.reshape(config.num_query_groups, -1, *tensor.shape[1:])
    num_queries = config.num_attention_heads // config.num_query_groups
    sizes = [num_queries * config.head_dim, config.head_dim, config.head_dim]
    return [part.reshape(-1, *tensor.shape[1:]) for part in grouped.split(sizes, dim=1)]
