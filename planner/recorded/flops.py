"""Dense-side cost coefficients counted from a model's shape (Equation 2), to be calibrated.

Unit: C routed tokens on the busiest EP rank of one layer cost 1, so a FLOP of dense work counts as
1 / (6 h f C) of it, for hidden size h and expert width f. Dense work of a DP slot is shared by its
TP x CP ranks, expert work by the EP group. Kernels differ in efficiency: calibrate on hardware.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.cost import CostModel, Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Sizes of one MoE model, as slime's `scripts/models/*.sh` give them."""

    num_layers: int
    num_dense_layers: int
    """Leading layers with a dense FFN."""
    num_experts: int
    top_k: int
    hidden: int
    dense_ffn: int
    expert_ffn: int
    shared_ffn: int = 0
    vocab: int
    num_heads: int
    head_dim: int
    """Query-key width of one head, rotary part included."""
    value_dim: int
    attention_params: int
    """Weights of the projections of one attention layer."""
    sparse_keys: int | None = None
    """Keys a token attends to under sparse attention; None attends to all."""
    index_width: int = 0
    """Heads x width of the sparse-attention indexer, which compares all pairs."""
    num_index_layers: int = 0
    """Layers that run the indexer; the others reuse its choice."""

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.num_dense_layers


def gqa_params(hidden: int, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """Projection weights of a grouped-query attention layer."""
    return hidden * head_dim * (2 * num_heads + 2 * num_kv_heads)


def mla_params(
    hidden: int, num_heads: int, q_rank: int, kv_rank: int, nope: int, rope: int, value: int
) -> int:
    """Projection weights of a multi-head latent attention layer."""
    queries = hidden * q_rank + q_rank * num_heads * (nope + rope)
    keys_values = hidden * (kv_rank + rope) + kv_rank * num_heads * (nope + value)
    return queries + keys_values + num_heads * value * hidden


def cost_from_shape(shape: ModelShape, capacity: int, tp: int, cp: int) -> CostModel:
    """Forward FLOPs of all layers as stage coefficients; backward scales both sides alike.

    One stage for layers that run attention over all pairs (or the indexer), and one for layers
    that reuse an indexer's choice, since the slowest slot is waited for in each layer.
    """
    unit = 6.0 * shape.hidden * shape.expert_ffn * tp * cp
    pair_width = shape.num_heads * (shape.head_dim + shape.value_dim)
    attention = 2.0 * shape.attention_params
    if shape.sparse_keys is not None:
        attention += 2.0 * pair_width * shape.sparse_keys
    ffn = 6.0 * shape.hidden * shape.shared_ffn + 2.0 * shape.hidden * shape.num_experts
    dense_ffn = 6.0 * shape.hidden * shape.dense_ffn
    head = 2.0 * shape.hidden * shape.vocab
    if shape.sparse_keys is None:
        linear = shape.num_layers * attention + shape.num_moe_layers * ffn
        linear += shape.num_dense_layers * dense_ffn + head
        pairs = float(shape.num_layers * pair_width)
        return CostModel(
            stages=(Stage(name="layers", alpha=linear / unit, beta=pairs * capacity / unit),)
        )
    index = 2.0 * shape.hidden * shape.index_width
    num_reusing = shape.num_layers - shape.num_index_layers
    dense_indexing = min(shape.num_dense_layers, shape.num_index_layers)
    indexing = shape.num_index_layers * (attention + index) + head
    indexing += dense_indexing * dense_ffn + (shape.num_index_layers - dense_indexing) * ffn
    pairs = float(shape.num_index_layers * shape.index_width)
    stages = [Stage(name="indexing_layers", alpha=indexing / unit, beta=pairs * capacity / unit)]
    if num_reusing:
        reusing = num_reusing * (attention + ffn)
        stages.append(Stage(name="reusing_layers", alpha=reusing / unit))
    return CostModel(stages=tuple(stages))
