"""`--routepack-config FILE`: every knob of RoutePack inside slime, each documented here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field, TypeAdapter, ValidationError, model_validator

from app.config.planning import CommitConfig, StageConfig
from app.config.section import explain, section
from planner.cost import CostModel, Stage
from planner.move_cost import MoveCost
from planner.policies import DECIDING
from planner.policy import PlannerOptions

NAMES = "app/slime/config.py documents every field"


class SlimeConfigError(ValueError):
    """A field of --routepack-config has a wrong value; says which and what to change."""


@section
class MoveConfig:
    """Measured prices of a move, behind `stop: net_benefit`; zeros make moves free."""

    seconds_per_gb: float = Field(default=0.0, ge=0)
    """Commit seconds per GB (2^30) moved inside a node (`routepack/time/commit` over moved_mb)."""
    seconds_per_remote_gb: float = Field(default=0.0, ge=0)
    """The same across nodes."""
    seconds_per_remote_token: float = Field(default=0.0, ge=0)
    """Added seconds for one routed token of an expert off its home node."""
    seconds_per_cost: float = Field(default=1.0, ge=0)
    """Seconds of training per unit of modelled joint cost (`routepack/guard/seconds_per_cost`)."""


@section
class SlimePlannerConfig:
    """The planner and its actor."""

    num_cores: int = Field(default=4, ge=1)
    """CPU cores that Ray reserves for the planner; also its search threads."""
    rows: Literal["makespan", "paper"] = "makespan"
    """Rule for the number of rows R."""
    rows_from: Literal["slime", "dp_local_ffd"] = "slime"
    """Rows that `reroute` keeps: slime's own schedule, or the paper's base."""
    placement: Literal["greedy", "few_moves"] = "greedy"
    """`few_moves` reaches the same balance with the fewest experts moved."""
    stop: Literal["cv", "net_benefit"] = "net_benefit"
    """When placement stops swapping; `cv` reproduces the paper."""
    cv_target: float = Field(default=5e-4, gt=0)
    """Target coefficient of variation of rank loads, per layer."""
    max_moves: int | None = Field(default=None, ge=0)
    """Most experts moved in one window, over all layers."""
    budget_seconds: float = Field(default=1.0, gt=0)
    """Search time of one optimizer step's rows."""
    deadline_seconds: float = Field(default=30.0, gt=0)
    """After this a window falls back to base rows and the current placement."""
    seed: int = 0
    """Seed of the search."""
    observe_as: Literal[DECIDING] = "full"  # type: ignore[valid-type]
    """The policy whose plans `observe` makes and logs."""
    stages: tuple[StageConfig, ...] = ()
    """Cost coefficients; empty derives them from the model's sizes and the job's TP x CP."""
    move: MoveConfig = Field(default_factory=MoveConfig)


@section
class CaptureConfig:
    """Routed experts of the rollouts."""

    missing: Literal["error", "estimate"] = "error"
    """A sample without routed experts: stop, or plan it on estimated demand."""


@section
class GuardConfig:
    """Steps a policy down that loses against its own prediction (full -> reschedule -> observe)."""

    patience: int = Field(default=0, ge=0)
    """Losing windows in a row before a step down; 0 switches the guard off."""
    calibration_windows: int = Field(default=3, ge=1)
    """First windows, run as `observe`, that measure seconds per unit of modelled cost."""
    tolerance: float = Field(default=0.02, ge=0)
    """A window loses when it takes this share longer than slime's own schedule would."""
    return_to_identity: bool = False
    """Move experts home when the guard steps down from a policy that moves them."""


@section
class LogConfig:
    """Where measurements go, besides slime's own trackers."""

    folder: str | None = None
    """Folder for metrics-<policy>.jsonl and the plans; None writes none."""
    save_plans: bool = False
    """Also write each window's plan there."""
    heatmap_every: int = Field(default=20, ge=0)
    """Rollouts between rank x layer heat maps; 0 writes none."""


@section
class SlimeConfig:
    """RoutePack inside slime."""

    planner: SlimePlannerConfig = Field(default_factory=SlimePlannerConfig)
    capture: CaptureConfig = Field(default_factory=CaptureConfig)
    commit: CommitConfig = Field(default_factory=CommitConfig)
    guard: GuardConfig = Field(default_factory=GuardConfig)
    log: LogConfig = Field(default_factory=LogConfig)

    @model_validator(mode="after")
    def _commits_whole(self):
        if self.commit.split:
            raise ValueError(
                "commit.split true: slime's actor commits everything before the first forward; "
                "remove it"
            )
        return self

    def options(self, *, shard_size: int, balance_data: bool, bytes_per_expert: float):
        """The planner's options for a job."""
        p, gb = self.planner, 2.0**30
        return PlannerOptions(
            rows=p.rows,
            rows_from=p.rows_from,
            placement=p.placement,
            stop=p.stop,
            cv_target=p.cv_target,
            max_moves=p.max_moves,
            budget_seconds=p.budget_seconds,
            num_threads=p.num_cores,
            seed=p.seed,
            shard_size=shard_size,
            slime_balance_data=balance_data,
            move=MoveCost(
                bytes_per_expert=bytes_per_expert,
                seconds_per_byte=p.move.seconds_per_gb / gb,
                seconds_per_remote_byte=p.move.seconds_per_remote_gb / gb,
                seconds_per_remote_token=p.move.seconds_per_remote_token,
                seconds_per_cost=p.move.seconds_per_cost,
            ),
        )

    def stages(self) -> CostModel | None:
        """The configured cost model, or None when it is to be derived from the model's sizes."""
        stages = [Stage(name=s.name, alpha=s.alpha, beta=s.beta) for s in self.planner.stages]
        return CostModel(stages=tuple(stages)) if stages else None


def load_slime_config(path: str | Path | None, *, output: str | None = None) -> SlimeConfig:
    """Read the YAML (defaults without one); `output` overrides `log.folder`.

    Raises SlimeConfigError naming field, value and what to change.
    """
    config = SlimeConfig() if path is None else _read(path)
    return config if output is None else replace(config, log=replace(config.log, folder=output))


def _read(path: str | Path) -> SlimeConfig:
    try:
        data = yaml.safe_load(Path(path).read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SlimeConfigError(f"--routepack-config {path}: not readable YAML: {error}") from None
    if not isinstance(data, dict):
        raise SlimeConfigError(
            f"--routepack-config {path}: holds {type(data).__name__}, expected a mapping"
        )
    try:
        return TypeAdapter(SlimeConfig).validate_python(data)
    except ValidationError as error:
        lines = [explain(entry, NAMES) for entry in error.errors()]
        raise SlimeConfigError(f"--routepack-config {path}:\n" + "\n".join(lines)) from None
