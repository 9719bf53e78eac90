"""One wandb run per policy, written by one process, every logged dict with its step key."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

STEP_KEY = "rollout/step"
PREFIX = "routepack/"


class WandbLog:
    """The only writer of one run; offline by default (docs/wandb.md)."""

    def __init__(
        self, policy: str, folder: Path, run_config: dict[str, Any], tags: Sequence[str] = ()
    ):
        """Open the run. run_config: the whole run's, with `name` and a `wandb` section."""
        import wandb

        wandb_config = run_config["wandb"]
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=wandb_config["project"],
            group=wandb_config["group"],
            name=f"{run_config['name']}-{policy}",
            job_type=policy,
            mode=wandb_config["mode"],
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
