"""The ranks, and the small model that they train."""

from __future__ import annotations

from pydantic import Field, model_validator

from app.config.section import section

VOCAB_SIZE = 64
"""Tokens of the embedded tasks (app/local/tokens.py names them)."""


@section
class RanksConfig:
    """Processes on this machine and how they are grouped."""

    world: int = Field(default=2, ge=1, le=16)
    """Number of gloo ranks, each a real process with one thread."""
    ep: int = Field(default=2, ge=1)
    """Expert-parallel size; must divide `world`. EDP = world / ep."""

    @model_validator(mode="after")
    def _ep_divides_world(self):
        if self.world % self.ep:
            raise ValueError(f"ep {self.ep} does not divide world {self.world}")
        return self


@section
class ModelConfig:
    """Shape of the small GLM-4-MoE (`Glm4MoeForCausalLM`)."""

    num_layers: int = Field(default=4, ge=2)
    """Transformer layers, dense ones included."""
    num_dense_layers: int = Field(default=1, ge=0)
    """Leading layers with a dense FFN instead of experts."""
    hidden_size: int = Field(default=128, ge=16)
    """Width of the residual stream."""
    num_attention_heads: int = Field(default=4, ge=1)
    """Query heads."""
    num_query_groups: int = Field(default=2, ge=1)
    """Key/value heads (GQA)."""
    head_dim: int = Field(default=32, ge=8)
    """Channels of a head."""
    ffn_hidden_size: int = Field(default=256, ge=8)
    """Width of the dense FFN."""
    moe_ffn_hidden_size: int = Field(default=128, ge=8)
    """Width of one expert; the shared expert has the same width."""
    num_experts: int = Field(default=16, ge=2)
    """Routed experts of an MoE layer; must be a multiple of `ranks.ep`."""
    top_k: int = Field(default=4, ge=2)
    """Experts a token uses; Megatron normalises their weights."""
    num_groups: int = Field(default=4, ge=1)
    """Expert groups of the group-limited router."""
    group_top_k: int = Field(default=2, ge=1)
    """Groups a token may use; top_k / group_top_k must be 2 (transformers sums a group's top 2)."""
    routed_scaling_factor: float = Field(default=1.5, gt=0)
    """Scale of the routed experts' output."""

    @model_validator(mode="after")
    def _router_rules_agree(self):
        if self.num_groups > 1 and self.top_k != 2 * self.group_top_k:
            raise ValueError(
                f"top_k {self.top_k} with group_top_k {self.group_top_k}: transformers sums the "
                "top 2 of a group, Megatron the top (top_k // group_top_k); use "
                "top_k = 2 * group_top_k, or num_groups 1"
            )
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"num_groups {self.num_groups} does not divide num_experts {self.num_experts}"
            )
        if self.num_dense_layers >= self.num_layers:
            raise ValueError(f"num_dense_layers {self.num_dense_layers} leaves no MoE layer")
        return self

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Global numbers of the MoE layers, counted from 0."""
        return tuple(range(self.num_dense_layers, self.num_layers))


@section
class RoutingSkewConfig:
    """Where the skew of routing comes from: a seeded offset of the router's expert bias."""

    expert_bias_std: float = Field(default=0.0, ge=0)
    """Standard deviation of the offset, on sigmoid scores in (0, 1); 0 leaves the router as is."""
    seed: int = 7
    """Seed of the offset."""
