"""Checkpoints of the embedded trainer: Megatron's own files in logical order, the layout beside."""

from __future__ import annotations

import app.local.cpu_megatron  # isort: skip  # noqa: F401  before megatron

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

from app.local.checkpoint_formats import Format, load_state, save_state
from app.local.trainer import LocalTrainer
from planner.placement import Placement
from train_hooks.checkpoint import (
    load_layout,
    logical_order,
    resume_layout,
    save_layout,
    stay_in_logical_order,
)

PROGRESS_FILE = "progress.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """The window to go on with, and whether experts are back where they were."""

    next_window: int
    layout_restored: bool


def save(
    trainer: LocalTrainer,
    folder: Path,
    next_window: int,
    fmt: Format,
    *,
    asynchronous: bool = False,
) -> None:
    """Write parameters, optimizer and layout; the folder appears whole or not at all.

    fmt: `dp_reshardable` and `torch` load at the same EP, `fully_reshardable` at any EP and EDP
    size. asynchronous: return while files are written; experts stay in logical order until the next
    commit, which waits for the files first. Collective over all ranks.
    """
    partial = folder.with_name(folder.name + ".partial")
    placement = trainer.committer.carried()
    progress = {"next_window": next_window, "format": fmt}
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    if not asynchronous:
        with logical_order(trainer.committer):
            save_state(trainer.ddp, trainer.optimizer, partial, fmt)
        _publish(partial, folder, placement, progress)
        return
    queue = AsyncCallsQueue()

    def finalize() -> None:
        queue.maybe_finalize_async_calls(blocking=True)
        _publish(partial, folder, placement, progress)

    stay_in_logical_order(trainer.committer, finalize)
    request = save_state(trainer.ddp, trainer.optimizer, partial, fmt, asynchronous=True)
    queue.schedule_async_request(request)


def load(trainer: LocalTrainer, folder: Path) -> Resumed:
    """Load a checkpoint written under any layout, and move experts to where they were.

    Raises ValueError naming a folder that is no checkpoint. Collective over all ranks.
    """
    try:
        progress = json.loads((folder / PROGRESS_FILE).read_text())
        fmt, next_window = progress["format"], int(progress["next_window"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} is not a checkpoint of routepack train: {error}") from None
    load_state(trainer.ddp, trainer.optimizer, folder, fmt)
    restored = resume_layout(trainer.committer, load_layout(folder))
    return Resumed(next_window=next_window, layout_restored=restored)


def _publish(partial: Path, folder: Path, placement: Placement, progress: dict) -> None:
    """Complete a checkpoint whose state is written, and give it its name."""
    if dist.get_rank() == 0:
        save_layout(partial, placement)
        (partial / PROGRESS_FILE).write_text(json.dumps(progress))
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    dist.barrier()
