"""One YAML per run: the configuration tree, documented where each field is declared."""

from app.config.model import ModelConfig, RanksConfig, RoutingSkewConfig
from app.config.planning import CommitConfig, PlannerConfig, StageConfig
from app.config.reporting import CompareConfig, OnlineConfig, WandbConfig
from app.config.run import ConfigError, RunConfig, load_config
from app.config.training import RolloutConfig, TasksConfig, TrainConfig, WarmupConfig

__all__ = [
    "CommitConfig",
    "CompareConfig",
    "ConfigError",
    "ModelConfig",
    "OnlineConfig",
    "PlannerConfig",
    "RanksConfig",
    "RolloutConfig",
    "RoutingSkewConfig",
    "RunConfig",
    "StageConfig",
    "TasksConfig",
    "TrainConfig",
    "WandbConfig",
    "WarmupConfig",
    "load_config",
]
