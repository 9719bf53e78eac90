"""Prompts, rollouts, optimizer steps and starting weights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from app.config.section import section


@section
class TasksConfig:
    """Two families of verifiable tasks: spell through the alphabet, sort a string of digits."""

    spell_share: float = Field(default=0.5, ge=0, le=1)
    """Share of prompts from the spell family; the rest sorts."""
    length_median: float = Field(default=14.0, gt=1)
    """Median length of an answer in tokens (lognormal)."""
    length_sigma: float = Field(default=0.9, ge=0)
    """Sigma of the lognormal: the long tail."""
    length_max: int = Field(default=120, ge=4, le=999)
    """Longest answer; longer draws are cut."""
    length_min: int = Field(default=3, ge=1)
    """Shortest answer."""


@section
class RolloutConfig:
    """One rollout = one sealed window."""

    engine: Literal["embedded", "sglang"] = "embedded"
    """`embedded`: transformers' Glm4Moe in each rank's process; `sglang`: a real SGLang server on
    the CPU, in its own environment (`bash launch/sglang_venv.sh`)."""
    num_groups: int = Field(default=8, ge=1)
    """GRPO groups (prompts) in a window, over all ranks; a multiple of `ranks.world`."""
    group_size: int = Field(default=8, ge=2)
    """Trajectories sampled per prompt."""
    max_new_tokens: int = Field(default=128, ge=1)
    """Longest response in tokens."""
    capture: bool = True
    """Ask the engine for routed experts; without them demand can only be estimated."""
    missing_capture: Literal["error", "estimate"] = "error"
    """What to do about a trajectory without usable routed experts."""


@section
class TrainConfig:
    """Optimizer and GRPO loss."""

    num_windows: int = Field(default=10, ge=1)
    """Windows of `routepack train`."""
    lr: float = Field(default=2e-4, ge=0)
    """Adam learning rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Gradient norm clip; 0 is off (exact comparisons use 0)."""
    num_steps_per_rollout: int = Field(default=1, ge=1)
    """Optimizer steps per rollout; each is a window with rows of its own, under one placement.
    Whole groups stay in a step; where they do not divide, later steps hold one group less."""
    ratio_clip: float = Field(default=0.2, gt=0, lt=1)
    """Clip range of the policy ratio."""
    calculate_per_token_loss: bool = True
    """Mean over the response tokens of an optimizer step; false: mean over its trajectories of each
    one's token mean (slime's default)."""
    use_kl_loss: bool = False
    """Add `kl_loss_coef` x KL to the frozen starting weights (slime's `low_var_kl`), report it."""
    kl_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL penalty; 0 with `use_kl_loss` only reports it."""
    data_pad_size_multiplier: int = Field(default=1, ge=1)
    """Positions of a cell are padded to a multiple of this; the cell's capacity is rounded down to
    it, so that padding fits."""
    save_every: int = Field(default=0, ge=0)
    """Windows between checkpoints of `routepack train`; 0 saves none."""
    checkpoint_format: Literal["fully_reshardable", "dp_reshardable", "torch"] = "fully_reshardable"
    """Megatron's format; the first loads at any EP and EDP size, the others at one."""
    checkpoint_async: bool = False
    """Go on while files are written; not with `torch`. Experts stay home until the next plan."""


@section
class WarmupConfig:
    """Seeded supervised training that gives the starting weights."""

    num_steps: int = Field(default=160, ge=0)
    """Optimizer steps."""
    batch_size: int = Field(default=24, ge=1)
    """Sequences per step."""
    lr: float = Field(default=2e-3, gt=0)
    """Peak learning rate."""
    max_seconds: float = Field(default=60.0, gt=0)
    """Training stops at this wall time at the latest."""
