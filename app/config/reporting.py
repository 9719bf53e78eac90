"""Weights & Biases, the paired comparison, and the online one."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from app.config.section import section
from app.config.training import RolloutConfig, TasksConfig, TrainConfig, WarmupConfig


@section
class WandbConfig:
    """Weights & Biases."""

    mode: Literal["offline", "online", "disabled"] = "offline"
    """`offline` writes files that `wandb sync` uploads later."""
    project: str = "routepack"
    """Project name."""
    group: str = "local"
    """Runs of one comparison share a group."""
    heatmap_every: int = Field(default=0, ge=0)
    """Windows between rank-load pictures of `routepack train`; 0 logs one, of the last window."""


@section
class CompareConfig:
    """The paired comparison (definitions.md)."""

    num_windows: int = Field(default=10, ge=2)
    """Windows compared; fewer than 10 are marked as such."""
    num_repeats: int = Field(default=3, ge=1)
    """Timed repeats of a policy on a window, after one warm-up."""


@section
class OnlineConfig:
    """`routepack train --online`: every policy learns, from the same start, on the same prompts.

    `rollout`, `tasks`, `train` and `warmup` replace the run's sections of the same name.
    """

    num_windows: int = Field(default=60, ge=2)
    """Windows of every run."""
    num_seeds: int = Field(default=3, ge=1)
    """Runs of every policy, with seeds `seed`, `seed + 1`, ...: they draw prompts and samples."""
    num_edge_windows: int = Field(default=10, ge=1)
    """Windows at both ends whose mean rewards are compared, and length of a resampled block."""
    rollout: RolloutConfig = Field(
        default_factory=lambda: RolloutConfig(num_groups=16, group_size=8, max_new_tokens=24)
    )
    tasks: TasksConfig = Field(
        default_factory=lambda: TasksConfig(length_median=8.0, length_sigma=0.3, length_max=16)
    )
    train: TrainConfig = Field(
        default_factory=lambda: TrainConfig(num_steps_per_rollout=2, lr=5e-4)
    )
    warmup: WarmupConfig = Field(default_factory=lambda: WarmupConfig(num_steps=25, batch_size=16))

    @model_validator(mode="after")
    def _ends_do_not_overlap(self):
        if 2 * self.num_edge_windows > self.num_windows:
            raise ValueError(
                f"num_edge_windows {self.num_edge_windows}: the first and the last windows overlap "
                f"in num_windows {self.num_windows}; use at most half of them"
            )
        return self
