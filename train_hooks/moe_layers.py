"""Find the MoE layers of a Megatron model by global layer number."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import nn


def unwrap(module: nn.Module) -> nn.Module:
    """Strip DDP and Float16Module wrappers from one model chunk."""
    while hasattr(module, "module"):
        module = module.module
    return module


def moe_layers(model_chunks: Sequence[nn.Module]) -> dict[int, MoELayer]:
    """Return this pipeline stage's MoE layers by global layer number, counted from 0.

    Dense layers never appear. MTP layers are left out: they keep identity placement.
    Source: `TransformerLayer.layer_number` of Megatron, which counts from 1 over all stages.
    """
    found: dict[int, MoELayer] = {}
    for chunk in model_chunks:
        for layer in unwrap(chunk).decoder.layers:
            if isinstance(layer.mlp, MoELayer):
                found[layer.layer_number - 1] = layer.mlp
    return dict(sorted(found.items()))
