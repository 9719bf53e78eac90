"""Run a function on gloo ranks: real processes that end together, clearly, without orphans."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from app.config import RunConfig

PR_SET_PDEATHSIG = 1
COLLECTIVE_TIMEOUT = timedelta(minutes=5)
"""Of a hung collective, not of a dead rank: that is noticed at once. Long, since a loaded machine
needs a minute to start ranks."""


class RankFailure(RuntimeError):
    """A rank ended early; every other rank has been stopped."""


def run_ranks(function: Callable[..., Any], config: RunConfig, *args: Any) -> Any:
    """Call `function(config, *args)` on `config.ranks.world` ranks; return rank 0's result.

    Each rank is a process with one thread, pinned to one core. When one ends early the others are
    stopped within seconds; when this process dies they are killed.
    Raises RankFailure naming the rank, with its signal or its traceback.
    """
    with tempfile.TemporaryDirectory(prefix="routepack-ranks-") as folder:
        context = mp.start_processes(
            _rank_main,
            args=(folder, function, config, args),
            nprocs=config.ranks.world,
            join=False,
            start_method="spawn",
        )
        try:
            while not context.join(grace_period=5):
                pass
        except mp.ProcessExitedException as error:
            raise RankFailure(
                f"rank {error.error_index} of {config.ranks.world} was ended by "
                f"{error.signal_name or f'exit code {error.exit_code}'}; all ranks were stopped. "
                "Nothing after the last finished window was kept"
            ) from None
        except mp.ProcessRaisedException as error:
            raise RankFailure(
                f"rank {error.error_index} of {config.ranks.world} failed; all ranks were "
                f"stopped.\n{error.msg.strip()}"
            ) from None
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
        return pickle.loads(Path(folder, "result").read_bytes())


def die_with_parent() -> None:
    """Let the kernel end this process when the one that started it ends, however it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _rank_main(rank: int, folder: str, function, config: RunConfig, args: tuple) -> None:
    die_with_parent()
    os.environ["OMP_NUM_THREADS"] = "1"
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})

    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    import app.local.cpu_megatron  # noqa: F401  before megatron

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=config.ranks.world,
        timeout=COLLECTIVE_TIMEOUT,
    )
    mpu.initialize_model_parallel(
        expert_model_parallel_size=config.ranks.ep,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(config.seed)
    result = function(config, *args)
    if rank == 0:
        Path(folder, "result").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
