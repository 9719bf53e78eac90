"""Cost coefficients of a slime job from its model sizes, at its TP x CP (Section 2.2).

The unit is one EP rank's expert work on C routed tokens. A DP slot's dense work is shared by
TP x CP ranks, its experts by the EP group, so dense coefficients shrink by TP x CP.
"""

from __future__ import annotations

from typing import Any

from planner.cost import CostModel, Stage


def cost_of_model(args: Any, capacity: int) -> CostModel:
    """Multiply-adds of attention and dense FFN a token, over those of one routed expert.

    args: slime's namespace (Megatron names). capacity: C, tokens of a cell.
    """
    hidden, heads, layers = args.hidden_size, args.num_attention_heads, args.num_layers
    num_moe = num_moe_layers(args)
    expert = 3 * hidden * args.moe_ffn_hidden_size
    if getattr(args, "multi_latent_attention", False):
        head = args.qk_head_dim + args.qk_pos_emb_head_dim
        query = (
            hidden * args.q_lora_rank + args.q_lora_rank * heads * head
            if args.q_lora_rank
            else hidden * heads * head
        )
        key_value = hidden * (args.kv_lora_rank + args.qk_pos_emb_head_dim)
        key_value += args.kv_lora_rank * heads * (args.qk_head_dim + args.v_head_dim)
        projections = query + key_value + heads * args.v_head_dim * hidden
        pair = heads * (head + args.v_head_dim) / 2
    else:
        head = args.kv_channels or hidden // heads
        groups = args.num_query_groups or heads
        projections = hidden * head * (2 * heads + 2 * groups)
        pair = heads * head  # causal: two products over t/2 positions
    shared = num_moe * (getattr(args, "moe_shared_expert_intermediate_size", None) or 0)
    ffn = 3 * hidden * ((layers - num_moe) * args.ffn_hidden_size + shared)
    share = args.tensor_model_parallel_size * args.context_parallel_size
    return CostModel(
        stages=(
            Stage(
                name="attention",
                alpha=layers * projections / expert / share,
                beta=layers * pair * capacity / expert / share,
            ),
            Stage(name="dense_ffn", alpha=ffn / expert / share),
        )
    )


def num_moe_layers(args: Any) -> int:
    """MoE layers of the model, from --moe-layer-freq."""
    freq = getattr(args, "moe_layer_freq", 1)
    if isinstance(freq, int):
        return len(range(0, args.num_layers, freq))
    return sum(int(flag) for flag in list(freq)[: args.num_layers])


def bytes_per_expert(args: Any, num_host_copies: int = 1) -> float:
    """Bytes that move with one expert: weight, fp32 main and two moments, and its host copies."""
    weight = 2 if args.bf16 or args.fp16 else 4
    main = 4 if args.bf16 or args.fp16 else 0
    elements = 3 * args.hidden_size * args.moe_ffn_hidden_size
    return float(elements * (weight * (1 + num_host_copies) + main + 8))
