"""Megatron's arguments for Ling 2.0, one a line: `python -m app.models.bailing_args MODEL [DIR]`.

Sizes come from DIR/config.json (default: MODEL_DIR) when it is there, else from the published
sizes of the named model, so that a dry run needs no checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

COMMON = dict(
    vocab_size=157184,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=256,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    num_shared_experts=1,
    first_k_dense_replace=1,
    rms_norm_eps=1e-6,
    rope_theta=600000,
    partial_rotary_factor=0.5,
    routed_scaling_factor=2.5,
    tie_word_embeddings=False,
)
MINI = dict(
    COMMON,
    hidden_size=2048,
    intermediate_size=5120,
    num_hidden_layers=20,
    num_attention_heads=16,
    moe_intermediate_size=512,
)
FLASH = dict(
    COMMON,
    hidden_size=4096,
    intermediate_size=9216,
    num_hidden_layers=32,
    num_attention_heads=32,
    moe_intermediate_size=1024,
)
SIZES: dict[str, dict[str, Any]] = {
    "ling-mini-2.0": MINI,
    "ring-mini-2.0": MINI,
    "ling-flash-2.0": FLASH,
}


def model_args(config: dict[str, Any]) -> list[str]:
    """Megatron flags of a Ling 2.0 configuration (keys as in its config.json)."""
    c = {**COMMON, **config}
    layers, dense = c["num_hidden_layers"], c["first_k_dense_replace"]
    freq = ",".join(["0"] * dense + ["1"] * (layers - dense))
    shared = c["num_shared_experts"] * c["moe_intermediate_size"]
    theta = (c.get("rope_parameters") or {}).get("rope_theta") or c["rope_theta"]
    flags = f"""
--num-layers {layers} --hidden-size {c["hidden_size"]} --ffn-hidden-size {c["intermediate_size"]}
--num-attention-heads {c["num_attention_heads"]} --group-query-attention
--num-query-groups {c["num_key_value_heads"]} --kv-channels {c["head_dim"]} --qk-layernorm
--disable-bias-linear --normalization RMSNorm --norm-epsilon {c["rms_norm_eps"]} --swiglu
--position-embedding-type rope --rotary-percent {c["partial_rotary_factor"]}
--rotary-base {int(theta)} --vocab-size {c["vocab_size"]}
--num-experts {c["num_experts"]} --moe-layer-freq [{freq}]
--moe-ffn-hidden-size {c["moe_intermediate_size"]}
--moe-shared-expert-intermediate-size {shared} --moe-router-topk {c["num_experts_per_tok"]}
--moe-router-num-groups {c["n_group"]} --moe-router-group-topk {c["topk_group"]}
--moe-router-score-function sigmoid --moe-router-enable-expert-bias
--moe-router-bias-update-rate 0 --moe-router-topk-scaling-factor {c["routed_scaling_factor"]}
--moe-router-dtype fp32 --moe-router-load-balancing-type none --moe-aux-loss-coeff 0
--moe-grouped-gemm --moe-token-drop-policy probs
""".split()
    if not c["tie_word_embeddings"]:
        flags.append("--untie-embeddings-and-output-weights")
    return flags


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in SIZES:
        sys.exit(f"model {name!r}: expected one of {sorted(SIZES)}")
    folder = sys.argv[2] if len(sys.argv) > 2 else os.environ.get("MODEL_DIR", "")
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text()) if folder and path.is_file() else SIZES[name]
    print("\n".join(model_args(config)))


if __name__ == "__main__":
    main()
