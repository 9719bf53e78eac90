"""One YAML per run: the configuration tree, documented where each field is declared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, TypeAdapter, ValidationError, model_validator

from app.config.model import VOCAB_SIZE, ModelConfig, RanksConfig, RoutingSkewConfig
from app.config.planning import CommitConfig, PlannerConfig
from app.config.reporting import CompareConfig, OnlineConfig, WandbConfig
from app.config.section import explain, section
from app.config.training import RolloutConfig, TasksConfig, TrainConfig, WarmupConfig
from planner.cost import CostModel, Stage
from planner.policy import PlannerOptions
from planner.recorded.flops import ModelShape, cost_from_shape, gqa_params
from planner.topology import Topology

NAMES = "docs/configuration.md lists the names"


class ConfigError(ValueError):
    """A configuration field has a wrong value; the message says which and what to change."""


@section
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
        lines = [explain(entry, NAMES) for entry in error.errors()]
        raise ConfigError(f"{path}:\n" + "\n".join(lines)) from None
