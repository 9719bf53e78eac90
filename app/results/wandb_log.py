"""One wandb run per policy, written by one process, every logged dict with its step key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from app.config import WandbConfig
from app.local.metrics import PREFIX, STEP_KEY


class WandbLog:
    """The only writer of one run; offline by default (docs/wandb.md)."""

    def __init__(
        self, config: WandbConfig, policy: str, folder: Path, run_config: dict[str, Any], tags=()
    ):
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=config.project,
            group=config.group,
            name=f"{run_config['name']}-{policy}",
            job_type=policy,
            mode=config.mode,
            dir=str(folder),
            config={**run_config, "policy": policy},
            tags=list(tags),
            settings=wandb.Settings(silent=True, console="off"),
            reinit="create_new",
        )
        self._run.define_metric(STEP_KEY)
        self._run.define_metric(f"{PREFIX}*", step_metric=STEP_KEY)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Log one window's metrics at rollout step `step`."""
        self._run.log({**{PREFIX + name: v for name, v in metrics.items()}, STEP_KEY: step})

    def log_image(self, step: int, name: str, path: Path) -> None:
        """Log one picture at rollout step `step`."""
        import wandb

        self._run.log({PREFIX + name: wandb.Image(str(path)), STEP_KEY: step})

    def finish(self) -> None:
        """Flush and close the run."""
        self._run.finish()
