"""A run small enough for tests: the real model family at toy width."""

from __future__ import annotations

from app.config import (
    CompareConfig,
    ModelConfig,
    PlannerConfig,
    RanksConfig,
    RolloutConfig,
    RoutingSkewConfig,
    RunConfig,
    TasksConfig,
    TrainConfig,
    WarmupConfig,
)


def tiny_config(world: int = 2, ep: int = 2, **sections) -> RunConfig:
    """Four layers (one dense), 16 experts, top-4, hidden 32; sections replace the defaults."""
    defaults = dict(
        name="tiny",
        ranks=RanksConfig(world=world, ep=ep),
        model=ModelConfig(hidden_size=32, head_dim=16, ffn_hidden_size=64, moe_ffn_hidden_size=24),
        routing_skew=RoutingSkewConfig(expert_bias_std=0.1),
        tasks=TasksConfig(length_median=8.0, length_max=24),
        rollout=RolloutConfig(num_groups=2 * world, group_size=4, max_new_tokens=24),
        train=TrainConfig(num_windows=3, clip_grad=0.0),
        planner=PlannerConfig(capacity=96, budget_seconds=0.02),
        warmup=WarmupConfig(num_steps=3, batch_size=4),
        compare=CompareConfig(num_windows=2, num_repeats=1),
    )
    return RunConfig(**{**defaults, **sections})
