"""Checkpoints of the embedded trainer through Megatron's dist_checkpointing."""

from __future__ import annotations

import app.local.cpu_megatron  # isort: skip  # noqa: F401  before megatron

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu

from app.local.trainer import LocalTrainer
from train_hooks.checkpoint import load_layout, logical_order, resume_layout, save_layout
from train_hooks.moe_layers import unwrap

Format = Literal["dp_reshardable", "fully_reshardable"]
PROGRESS_FILE = "progress.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """The window to go on with, and whether experts are back where they were."""

    next_window: int
    layout_restored: bool


def save(trainer: LocalTrainer, folder: Path, next_window: int, fmt: Format) -> None:
    """Write parameters, optimizer and layout; the folder appears whole or not at all.

    fmt: `dp_reshardable` loads at the same EP; `fully_reshardable` at any EP and EDP size.
    Collective over all ranks.
    """
    partial = folder.with_name(folder.name + ".partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    with logical_order(trainer.committer):
        dist_checkpointing.save(_state(trainer, fmt, is_loading=False), str(partial))
    if dist.get_rank() == 0:
        save_layout(partial, trainer.layout.placement())
        progress = {"next_window": next_window, "format": fmt}
        (partial / PROGRESS_FILE).write_text(json.dumps(progress))
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    dist.barrier()


@torch.no_grad()  # fp32 main shards are views of parameters, which Megatron copies into
def load(trainer: LocalTrainer, folder: Path) -> Resumed:
    """Load a checkpoint written under any layout, and move experts to where they were.

    Raises ValueError naming a folder that is no checkpoint. Collective over all ranks.
    """
    try:
        progress = json.loads((folder / PROGRESS_FILE).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} is not a checkpoint of routepack train: {error}") from None
    _prepare_torch_adam(trainer)
    loaded = dist_checkpointing.load(
        _state(trainer, progress["format"], is_loading=True), str(folder)
    )
    unwrap(trainer.ddp).load_state_dict(loaded["model"])
    trainer.optimizer.load_state_dict(loaded["optimizer"])
    _separate_step_counters(trainer)
    restored = resume_layout(trainer.committer, load_layout(folder))
    return Resumed(next_window=progress["next_window"], layout_restored=restored)


def _prepare_torch_adam(trainer: LocalTrainer) -> None:
    """Let Megatron load into torch's Adam, which counts its steps in a tensor of each parameter.

    Megatron 0.16.1 reads that counter before the first step and expects it among the tensors of
    `fully_reshardable` (distrib_optimizer.py, `_set_main_param_and_optimizer_states`). Both hold
    for fused Adam only, so the moments are made here and the counter is left as it is.
    """
    for part in trainer.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for param in group["params"]:
                state = part.optimizer.state[param]
                state.setdefault("step", torch.zeros(()))
                for name in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(name, torch.zeros_like(param))
        read = part._get_main_param_and_optimizer_states
        write = part._set_main_param_and_optimizer_states

        def write_with_step(param, tensors, read=read, write=write):
            write(param, {"step": read(param)["step"], **tensors})

        part._set_main_param_and_optimizer_states = write_with_step


def _separate_step_counters(trainer: LocalTrainer) -> None:
    """Give each parameter its own counter: Megatron hands one tensor to all of them, and torch's
    Adam would count every parameter's step in it."""
    for part in trainer.optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            state["step"] = state["step"].clone()


def _state(trainer: LocalTrainer, fmt: Format, *, is_loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": fmt,
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
    }
    model = unwrap(trainer.ddp).sharded_state_dict(metadata=metadata)
    optimizer = trainer.optimizer.sharded_state_dict(
        model, is_loading=is_loading, metadata=metadata
    )
    return {"model": model, "optimizer": optimizer}
