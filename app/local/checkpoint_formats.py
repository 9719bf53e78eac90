"""Megatron's checkpoint formats, as plain Megatron writes and reads them; no layout in sight.

`dp_reshardable` and `fully_reshardable` go through megatron.core.dist_checkpointing; `torch` is the
legacy format, `mp_rank_*/model_optim_rng.pt` and `distrib_optim.pt` (megatron/training/
checkpointing.py, `--ckpt-format torch`).
"""

from __future__ import annotations

import app.local.cpu_megatron  # isort: skip  # noqa: F401  before megatron

from multiprocessing import get_context
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from app.local.ranks import die_with_parent
from train_hooks.moe_layers import unwrap

Format = Literal["dp_reshardable", "fully_reshardable", "torch"]


def save_state(
    ddp, optimizer, folder: Path, fmt: Format, *, asynchronous: bool = False
) -> AsyncRequest | None:
    """Write parameters and optimizer; collective over all ranks.

    asynchronous: return the request that writes them, to be scheduled by the caller. Raises
    ValueError for `torch`, which Megatron only writes synchronously.
    """
    if fmt == "torch":
        if asynchronous:
            raise ValueError(
                "train.checkpoint_async: got true with checkpoint_format torch, which Megatron "
                "writes synchronously; choose fully_reshardable or dp_reshardable"
            )
        _save_torch(ddp, optimizer, folder)
        return None
    _start_results_queue()
    return dist_checkpointing.save(
        _sharded_state(ddp, optimizer, fmt, is_loading=False),
        str(folder),
        async_sharded_save=asynchronous,
    )


@torch.no_grad()  # fp32 main shards are views of parameters, which Megatron copies into
def load_state(ddp, optimizer, folder: Path, fmt: Format) -> None:
    """Load what `save_state`, or plain Megatron, wrote; collective over all ranks."""
    _prepare_torch_adam(optimizer)
    if fmt == "torch":
        _load_torch(ddp, optimizer, folder)
    else:
        state = _sharded_state(ddp, optimizer, fmt, is_loading=True)
        loaded = dist_checkpointing.load(state, str(folder))
        unwrap(ddp).load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
    _separate_step_counters(optimizer)


def _start_results_queue() -> None:
    """Start the manager process that Megatron keeps between saves, so that it ends with its rank.

    Megatron starts it without that (filesystem_async.py), and a killed rank would leave it behind.
    """
    if filesystem_async._results_queue is None:
        manager = SyncManager(ctx=get_context("spawn"))
        manager.start(die_with_parent)
        filesystem_async._results_queue = manager.Queue()


def _sharded_state(ddp, optimizer, fmt: Format, *, is_loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": fmt,
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
    }
    model = unwrap(ddp).sharded_state_dict(metadata=metadata)
    return {
        "model": model,
        "optimizer": optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata),
    }


def _torch_folder(folder: Path) -> Path:
    ranks = (
        mpu.get_tensor_model_parallel_rank(),
        mpu.get_pipeline_model_parallel_rank(),
        mpu.get_expert_model_parallel_rank(),
    )
    return folder / "mp_rank_{:02d}_{:03d}_{:03d}".format(*ranks)


def _save_torch(ddp, optimizer, folder: Path) -> None:
    target = _torch_folder(folder)
    target.mkdir(parents=True, exist_ok=True)
    if mpu.get_expert_data_parallel_rank() == 0:
        model = unwrap(ddp).state_dict_for_save_checkpoint()
        torch.save(
            {"model": model, "optimizer": optimizer.state_dict()}, target / "model_optim_rng.pt"
        )
    _use_gloo_groups(optimizer)
    optimizer.save_parameter_state(str(target / "distrib_optim.pt"))
    dist.barrier()


def _load_torch(ddp, optimizer, folder: Path) -> None:
    source = _torch_folder(folder)
    saved = torch.load(source / "model_optim_rng.pt", weights_only=False)
    unwrap(ddp).load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    _use_gloo_groups(optimizer)
    optimizer.load_parameter_state(str(source / "distrib_optim.pt"))


def _use_gloo_groups(optimizer) -> None:
    """The format gathers over gloo groups; on a CPU every group is one already."""
    for part in optimizer.chained_optimizers:
        part.data_parallel_group_gloo = part.data_parallel_group


def _prepare_torch_adam(optimizer) -> None:
    """Let Megatron load into torch's Adam, which counts its steps in a tensor of each parameter.

    Megatron 0.16.1 reads that counter before the first step and expects it among the tensors of
    `fully_reshardable` (distrib_optimizer.py, `_set_main_param_and_optimizer_states`). Both hold
    for fused Adam only, so the moments are made here and the counter is left as it is.
    """
    for part in optimizer.chained_optimizers:
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


def _separate_step_counters(optimizer) -> None:
    """Give each parameter its own counter: Megatron hands one tensor to all of them, and torch's
    Adam would count every parameter's step in it."""
    for part in optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            state["step"] = state["step"].clone()
