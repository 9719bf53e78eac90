"""One YAML per run: the configuration tree, documented where each field is declared."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from app.local.tokens import VOCAB_SIZE
from planner.cost import CostModel, Stage
from planner.policy import PlannerOptions
from planner.recorded.flops import ModelShape, cost_from_shape, gqa_params
from planner.topology import Topology

_STRICT = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class ConfigError(ValueError):
    """A configuration field has a wrong value; the message says which and what to change."""


def _section(cls):
    return dataclass(config=_STRICT, frozen=True, kw_only=True)(cls)


@_section
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


@_section
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


@_section
class RoutingSkewConfig:
    """Where the skew of routing comes from: a seeded offset of the router's expert bias."""

    expert_bias_std: float = Field(default=0.0, ge=0)
    """Standard deviation of the offset, on sigmoid scores in (0, 1); 0 leaves the router as is."""
    seed: int = 7
    """Seed of the offset."""


@_section
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


@_section
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


@_section
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


@_section
class StageConfig:
    """Cost of one dense-side stage on a cell: alpha/C * sum t + beta * sum (t/C)^2."""

    name: str
    """Label of the stage in tables."""
    alpha: float = Field(ge=0)
    """Token-linear weight, in units of one expert's work on C tokens."""
    beta: float = Field(default=0.0, ge=0)
    """Token-pair weight, in the same unit."""


@_section
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


@_section
class CommitConfig:
    """Moving experts."""

    staging_mb: float = Field(default=256, gt=0)
    """Megabytes (2^20) of send and receive buffers, held between commits."""
    verify: Literal["off", "sample", "full"] = "off"
    """Checksums before and after a move: of no layer, a quarter of the moved ones, or all."""
    split: bool = False
    """Move parameters before the first forward, optimizer state only before `optimizer.step`."""


@_section
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


@_section
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


@_section
class CompareConfig:
    """The paired comparison (definitions.md)."""

    num_windows: int = Field(default=10, ge=2)
    """Windows compared; fewer than 10 are marked as such."""
    num_repeats: int = Field(default=3, ge=1)
    """Timed repeats of a policy on a window, after one warm-up."""


@_section
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


@_section
class RunConfig:
    """A whole run."""

    name: str = "local"
    """Label of the run in files and wandb."""
    seed: int = 42
    """Seed of everything that is drawn."""
    ranks: RanksConfig = Field(default_factory=RanksConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    routing_skew: RoutingSkewConfig = Field(default_factory=RoutingSkewConfig)
    tasks: TasksConfig = Field(default_factory=TasksConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    planner: PlannerConfig = Field(default_factory=PlannerConfig)
    commit: CommitConfig = Field(default_factory=CommitConfig)
    wandb: WandbConfig = Field(default_factory=WandbConfig)
    warmup: WarmupConfig = Field(default_factory=WarmupConfig)
    compare: CompareConfig = Field(default_factory=CompareConfig)
    online: OnlineConfig = Field(default_factory=OnlineConfig)

    @model_validator(mode="after")
    def _sizes_fit(self):
        if self.model.num_experts % self.ranks.ep:
            raise ValueError(
                f"model.num_experts {self.model.num_experts} is not a multiple of ranks.ep "
                f"{self.ranks.ep}: every EP rank holds the same number of experts"
            )
        if self.rollout.num_groups % self.ranks.world:
            raise ValueError(
                f"rollout.num_groups {self.rollout.num_groups} is not a multiple of ranks.world "
                f"{self.ranks.world}: every rank samples the same number of prompts"
            )
        self._check_steps()
        if self.train.checkpoint_async and self.train.checkpoint_format == "torch":
            raise ValueError(
                "train.checkpoint_async true with train.checkpoint_format torch, which Megatron "
                "writes synchronously: choose fully_reshardable or dp_reshardable"
            )
        return self

    def _check_steps(self) -> None:
        rollout, steps = self.rollout, self.train.num_steps_per_rollout
        fewest = rollout.num_groups // steps * rollout.group_size
        if fewest < self.ranks.world:
            raise ValueError(
                f"train.num_steps_per_rollout {steps}: the last step holds {fewest} trajectories "
                f"({rollout.num_groups} groups of {rollout.group_size}) for ranks.world "
                f"{self.ranks.world}; every rank needs one, so lower it or raise rollout.num_groups"
            )
        if self.train.data_pad_size_multiplier > self.planner.capacity:
            raise ValueError(
                f"train.data_pad_size_multiplier {self.train.data_pad_size_multiplier} is above "
                f"planner.capacity {self.planner.capacity}: a cell must hold at least one multiple"
            )
        if self.train.kl_loss_coef and not self.train.use_kl_loss:
            raise ValueError(
                f"train.kl_loss_coef {self.train.kl_loss_coef} without train.use_kl_loss has no "
                "effect: set use_kl_loss: true, or the coefficient to 0"
            )

    @property
    def topology(self) -> Topology:
        """The planner's view of the ranks: one DP slot per rank, EP groups of neighbours."""
        return Topology.uniform(
            dp=self.ranks.world,
            ep=self.ranks.ep,
            edp=self.ranks.world // self.ranks.ep,
            capacity=self.cell_capacity,
        )

    @property
    def cell_capacity(self) -> int:
        """Capacity C less what padding may add: rounded down to the padding multiple."""
        multiple = self.train.data_pad_size_multiplier
        return self.planner.capacity // multiple * multiple

    @property
    def cost(self) -> CostModel:
        """Configured coefficients, or those that the model's operation counts give."""
        if self.planner.stages:
            stages = [Stage(name=s.name, alpha=s.alpha, beta=s.beta) for s in self.planner.stages]
            return CostModel(stages=tuple(stages))
        return _cost_from_operations(self.model, self.cell_capacity)

    def planner_options(self, **changes: Any) -> PlannerOptions:
        """The planner's options, with `changes` on top."""
        options = dict(
            rows=self.planner.rows,
            rows_from=self.planner.rows_from,
            stop=self.planner.stop,
            cv_target=self.planner.cv_target,
            budget_seconds=self.planner.budget_seconds,
            num_threads=self.planner.num_threads,
            seed=self.seed,
            shard_size=self.rollout.group_size,
        )
        return PlannerOptions(**{**options, **changes})


def _cost_from_operations(model: ModelConfig, capacity: int) -> CostModel:
    """Dense-side coefficients counted from the model's shape (planner/recorded/flops.py)."""
    shape = ModelShape(
        num_layers=model.num_layers,
        num_dense_layers=model.num_dense_layers,
        num_experts=model.num_experts,
        top_k=model.top_k,
        hidden=model.hidden_size,
        dense_ffn=model.ffn_hidden_size,
        expert_ffn=model.moe_ffn_hidden_size,
        shared_ffn=model.moe_ffn_hidden_size,
        vocab=VOCAB_SIZE,
        num_heads=model.num_attention_heads,
        head_dim=model.head_dim,
        value_dim=model.head_dim,
        attention_params=gqa_params(
            model.hidden_size, model.num_attention_heads, model.num_query_groups, model.head_dim
        ),
    )
    return cost_from_shape(shape, capacity, tp=1, cp=1)


def load_config(path: str | Path) -> RunConfig:
    """Read a run's YAML; raises ConfigError naming the field, the value and what to change."""
    path = Path(path)
    try:
        data = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"no configuration file {path}: try configs/local_tiny.yaml") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not readable YAML: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds {type(data).__name__}, expected a mapping of sections")
    try:
        return TypeAdapter(RunConfig).validate_python(data)
    except ValidationError as error:
        raise ConfigError(f"{path}:\n" + "\n".join(_explain(e) for e in error.errors())) from None


def _explain(error: dict) -> str:
    field = ".".join(str(part) for part in error["loc"]) or "(whole file)"
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"  {field}: no such field; docs/configuration.md lists the names"
    return f"  {field}: got {error['input']!r}: {error['msg'].removeprefix('Value error, ')}"
