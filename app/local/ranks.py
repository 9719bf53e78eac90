"""Run a function on gloo ranks: real processes that end together, clearly, without orphans.

Ranks are forked from a server that has imported torch, Megatron and transformers once: importing
them takes longer than most of what ranks are started for. Each is a fresh process all the same.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import tempfile
import threading
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any, Literal

import torch.multiprocessing as mp

from app.config import RunConfig

PR_SET_PDEATHSIG = 1
COLLECTIVE_TIMEOUT = timedelta(minutes=5)
"""Of a hung collective, not of a dead rank: that is noticed at once. Long, since a loaded machine
needs a minute to start ranks."""


class RankFailure(RuntimeError):
    """A rank ended early; every other rank has been stopped."""


def run_ranks(
    function: Callable[..., Any],
    config: RunConfig,
    *args: Any,
    start_method: Literal["forkserver", "spawn"] = "forkserver",
) -> Any:
    """Call `function(config, *args)` on `config.ranks.world` ranks; return rank 0's result.

    Each rank is a process with one thread, pinned to one core. When one ends early the others are
    stopped within seconds; when this process dies they are killed. start_method: `spawn` where the
    environment must be there from the first line of a process (glibc's settings).
    Raises RankFailure naming the rank, with its signal or its traceback.
    """
    if start_method == "forkserver":
        _start_server()
    with tempfile.TemporaryDirectory(prefix="routepack-ranks-") as folder:
        context = mp.start_processes(
            _rank_main,
            args=(folder, dict(os.environ), function, config, args),
            nprocs=config.ranks.world,
            join=False,
            start_method=start_method,
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


def _start_server() -> None:
    """Start the server that ranks are forked from, once; it ends with this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["app.local.preload"])
    kept = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        if kept is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = kept


def _die_with_starter() -> None:
    """End this rank when the process that asked for it ends, however it ends.

    The kernel's death signal follows the server that forked the rank, so a thread watches instead.
    """
    starter = multiprocessing.parent_process()
    assert starter is not None, "a rank is started by multiprocessing"

    def watch() -> None:
        connection.wait([starter.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="watch the starter").start()


def die_with_parent() -> None:
    """Let the kernel end this process when the one that started it ends, however it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _rank_main(
    rank: int, folder: str, environment: dict[str, str], function, config: RunConfig, args: tuple
) -> None:
    _die_with_starter()
    os.environ.clear()
    os.environ.update(environment, OMP_NUM_THREADS="1")
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
