"""The planner's knobs, and how experts are moved."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from app.config.section import section


@section
class StageConfig:
    """Cost of one dense-side stage on a cell: alpha/C * sum t + beta * sum (t/C)^2."""

    name: str
    """Label of the stage in tables."""
    alpha: float = Field(ge=0)
    """Token-linear weight, in units of one expert's work on C tokens, at this job's TP x CP."""
    beta: float = Field(default=0.0, ge=0)
    """Token-pair weight, in the same unit."""


@section
class PlannerConfig:
    """Knobs of the planner; the defaults are those of a cluster."""

    capacity: int = Field(default=512, ge=2)
    """Capacity C of a cell in tokens (max_tokens_per_gpu x CP)."""
    rows: Literal["makespan", "paper"] = "makespan"
    """Rule for the number of rows R."""
    rows_from: Literal["slime", "dp_local_ffd"] = "dp_local_ffd"
    """Rows that `reroute` keeps."""
    stop: Literal["cv", "net_benefit"] = "cv"
    """When placement stops swapping."""
    cv_target: float = Field(default=5e-4, gt=0)
    """Target coefficient of variation of rank loads, per layer."""
    budget_seconds: float = Field(default=0.3, gt=0)
    """Search time per window."""
    num_threads: int = Field(default=1, ge=1)
    """Search threads."""
    deadline_seconds: float = Field(default=10.0, gt=0)
    """After this the window falls back to base rows and the current placement."""
    stages: tuple[StageConfig, ...] = ()
    """Cost coefficients; empty derives them from the model's floating-point operations."""
    recalibrate_every: int = Field(default=0, ge=0)
    """Windows after which `routepack train` re-fits the cost to measured row times; 0 never."""


@section
class CommitConfig:
    """Moving experts."""

    staging_mb: float = Field(default=256, gt=0)
    """Megabytes (2^20) of send and receive buffers on the device, held between commits."""
    verify: Literal["off", "sample", "full"] = "off"
    """Checksums before and after a move: of no layer, a quarter of the moved ones, or all."""

    split: bool = False
    """Move parameters before the first forward, optimizer state only before `optimizer.step`."""
