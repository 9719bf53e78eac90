"""Named sources with everything a plan needs: windows, topology and cost model.

`synthetic:*` are the paper's offline shapes (D = P = 8, C = 8192, Appendix K). `slime:*` take
topology, batch size and token cap from slime's own launch scripts (commit 624b824a) and the model
shape from its `scripts/models/`; their demand is synthetic, their response lengths are assumed
(median given below, cut at the script's maximum), their cost is counted in FLOPs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from planner.cost import CostModel, Stage
from planner.recorded.flops import ModelShape, cost_from_shape, gqa_params, mla_params
from planner.recorded.synthetic import FLASH, TINY, Corpus, synthetic_windows
from planner.topology import Topology
from planner.window import Window


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """One named source.

    The cost coefficients hold per DP slot at `topology.tp` x `topology.cp`.
    """

    name: str
    topology: Topology
    cost: CostModel
    corpus: Corpus
    layer_numbers: tuple[int, ...]
    """Global numbers (0-based) of the MoE layers."""
    script: str
    """Where the shape comes from."""

    def windows(self, num_windows: int = 20, seed: int = 0) -> Iterator[Window]:
        """Yield consecutive windows; seed 0 is the one that figures are reported on."""
        return synthetic_windows(self.corpus, num_windows, seed, self.layer_numbers)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Script:
    """What one slime launch script says."""

    file: str
    model: ModelShape
    num_gpus: int
    tp: int
    pp: int
    cp: int
    ep: int
    max_tokens_per_gpu: int
    num_prompts: int
    """Prompts of one optimizer step: rollout batch / steps per rollout."""
    group_size: int
    max_response: int
    median_response: int
    """Assumed."""


_QWEN3_30B = ModelShape(
    num_layers=48,
    num_dense_layers=0,
    num_experts=128,
    top_k=8,
    hidden=2048,
    dense_ffn=6144,
    expert_ffn=768,
    vocab=151936,
    num_heads=32,
    head_dim=128,
    value_dim=128,
    attention_params=gqa_params(2048, 32, 4, 128),
)
_QWEN3_235B = ModelShape(
    num_layers=94,
    num_dense_layers=0,
    num_experts=128,
    top_k=8,
    hidden=4096,
    dense_ffn=12288,
    expert_ffn=1536,
    vocab=151936,
    num_heads=64,
    head_dim=128,
    value_dim=128,
    attention_params=gqa_params(4096, 64, 4, 128),
)
_GLM_355B = ModelShape(
    num_layers=92,
    num_dense_layers=3,
    num_experts=160,
    top_k=8,
    hidden=5120,
    dense_ffn=12288,
    expert_ffn=1536,
    shared_ffn=1536,
    vocab=151552,
    num_heads=96,
    head_dim=128,
    value_dim=128,
    attention_params=gqa_params(5120, 96, 8, 128),
)
# The indexer (32 heads of 128, 2048 keys) is in the model's configuration, not in slime's script.
_GLM5 = ModelShape(
    num_layers=78,
    num_dense_layers=3,
    num_experts=256,
    top_k=8,
    hidden=6144,
    dense_ffn=12288,
    expert_ffn=2048,
    shared_ffn=2048,
    vocab=154880,
    num_heads=64,
    head_dim=256,
    value_dim=256,
    attention_params=mla_params(6144, 64, 2048, 512, 192, 64, 256),
    sparse_keys=2048,
    index_width=32 * 128,
    num_index_layers=78,
)
_MINIMAX_M2 = ModelShape(
    num_layers=62,
    num_dense_layers=0,
    num_experts=256,
    top_k=8,
    hidden=3072,
    dense_ffn=1536,
    expert_ffn=1536,
    vocab=200064,
    num_heads=48,
    head_dim=128,
    value_dim=128,
    attention_params=gqa_params(3072, 48, 8, 128),
)

_SCRIPTS = {
    "slime:qwen3-30b": _Script(
        file="run-qwen3-30B-A3B.sh",
        model=_QWEN3_30B,
        num_gpus=8,
        tp=4,
        pp=1,
        cp=1,
        ep=8,
        max_tokens_per_gpu=20480,
        num_prompts=32,
        group_size=8,
        max_response=8192,
        median_response=3072,
    ),
    "slime:qwen3-235b": _Script(
        file="run-qwen3-235B-A22B.sh",
        model=_QWEN3_235B,
        num_gpus=64,
        tp=4,
        pp=4,
        cp=2,
        ep=16,
        max_tokens_per_gpu=16384,
        num_prompts=8,
        group_size=8,
        max_response=8192,
        median_response=3072,
    ),
    "slime:glm4.7-355b": _Script(
        file="run-glm4.7-355B-A32B.sh",
        model=_GLM_355B,
        num_gpus=64,
        tp=8,
        pp=4,
        cp=2,
        ep=16,
        max_tokens_per_gpu=16384,
        num_prompts=128 // 4,
        group_size=8,
        max_response=32768,
        median_response=4096,
    ),
    "slime:glm5.2": _Script(
        file="run-glm5.2-744B-A40B.sh",
        model=replace(_GLM5, num_index_layers=21),  # layers 1, 2, 3, 7, 11, ..., 75
        num_gpus=256,
        tp=4,
        pp=8,
        cp=8,
        ep=32,
        max_tokens_per_gpu=8192,
        num_prompts=8,
        group_size=8,
        max_response=65536,
        median_response=8192,
    ),
    "slime:glm5": _Script(
        file="run-glm5-744B-A40B.sh",
        model=_GLM5,
        num_gpus=256,
        tp=4,
        pp=4,
        cp=2,
        ep=32,
        max_tokens_per_gpu=16384,
        num_prompts=8,
        group_size=8,
        max_response=32768,
        median_response=4096,
    ),
    "slime:minimax-m2": _Script(
        file="run-minimax-m2.sh",
        model=_MINIMAX_M2,
        num_gpus=128,
        tp=2,
        pp=2,
        cp=1,
        ep=4,
        max_tokens_per_gpu=8192,
        num_prompts=128 // 4,
        group_size=8,
        max_response=32768,
        median_response=4096,
    ),
}

_SYNTHETIC = {
    "synthetic:tiny": (TINY, (148.689, 42.896, 53.333)),
    "synthetic:flash": (FLASH, (155.017, 27.803, 24.889)),
}

PRESET_NAMES = (*_SYNTHETIC, *_SCRIPTS)
_GPUS_PER_NODE = 8


def preset(name: str) -> Preset:
    """Look a preset up by name; raises ValueError listing the names that exist."""
    if name in _SYNTHETIC:
        return _paper_preset(name)
    if name in _SCRIPTS:
        return _slime_preset(name, _SCRIPTS[name])
    raise ValueError(f"preset {name!r}: expected one of {', '.join(PRESET_NAMES)}")


def _paper_preset(name: str) -> Preset:
    corpus, (linear, attention, pairs) = _SYNTHETIC[name]
    return Preset(
        name=name,
        topology=Topology.uniform(dp=8, ep=8, capacity=8192),
        cost=CostModel(
            stages=(
                Stage(name="kda_and_dense_ffn", alpha=linear),
                Stage(name="mla", alpha=attention, beta=pairs),
            )
        ),
        corpus=corpus,
        layer_numbers=tuple(range(corpus.num_layers)),
        script="Section 2.3.2 and Appendix K of the paper",
    )


def _slime_preset(name: str, script: _Script) -> Preset:
    model = script.model
    slot = script.tp * script.cp
    dp = script.num_gpus // (slot * script.pp)
    num_shards = script.num_gpus // (script.pp * script.ep)
    capacity = script.max_tokens_per_gpu * script.cp
    topology = Topology.uniform(
        dp=dp,
        ep=script.ep,
        capacity=capacity,
        edp=num_shards,
        pp=script.pp,
        tp=script.tp,
        cp=script.cp,
        ranks_per_node=_GPUS_PER_NODE if script.ep > _GPUS_PER_NODE else None,
    )
    like = TINY if model.num_experts <= 128 else FLASH
    # FLASH's narrow spread at 8k; a long tail where the script allows long responses
    spread = FLASH.response_log[1] if script.max_response <= 8192 else TINY.response_log[1]
    corpus = replace(
        like,
        num_layers=model.num_moe_layers,
        num_experts=model.num_experts,
        top_k=model.top_k,
        num_ranks=script.ep,
        num_groups=script.num_prompts,
        group_size=script.group_size,
        max_response=script.max_response,
        response_log=(float(np.log(script.median_response)), spread),
    )
    return Preset(
        name=name,
        topology=topology,
        cost=cost_from_shape(model, capacity, script.tp, script.cp),
        corpus=corpus,
        layer_numbers=tuple(range(model.num_dense_layers, model.num_layers)),
        script=f"slime 624b824a scripts/{script.file}",
    )
