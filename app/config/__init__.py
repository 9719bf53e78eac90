"""One YAML per run: the configuration tree, documented where each field is declared."""

from app.config.run import (
    CommitConfig,
    CompareConfig,
    ConfigError,
    ModelConfig,
    OnlineConfig,
    PlannerConfig,
    RanksConfig,
    RolloutConfig,
    RoutingSkewConfig,
    RunConfig,
    StageConfig,
    TasksConfig,
    TrainConfig,
    WandbConfig,
    WarmupConfig,
    load_config,
)

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
