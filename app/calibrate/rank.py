"""Run the measurement on one rank of its own, on the CPU or on a GPU."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Sequence

from app.calibrate.rows import Cell
from app.config import RunConfig

KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
"""glibc keeps freed memory: else a call that crosses its limits pays for page faults, 20% of its
time, by the luck of earlier calls."""


def run_on_device(config: RunConfig, device: str, cells: Sequence[Cell], num_repeats: int):
    """Return the `measure.Times` of `cells`; `config` holds one rank's experts.

    Raises ValueError when no CUDA device is there.
    """
    if device == "cuda":
        return _on_cuda(config, cells, num_repeats)
    from app.local.ranks import run_ranks

    kept = {name: os.environ.get(name) for name in KEEP_MEMORY}
    os.environ.update(KEEP_MEMORY)
    try:
        return run_ranks(_measure, config, device, list(cells), num_repeats, start_method="spawn")
    finally:
        for name, value in kept.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _measure(config: RunConfig, device: str, cells: list[Cell], num_repeats: int):
    from app.calibrate.measure import measure_rank

    return measure_rank(config, device, cells, num_repeats)


def _on_cuda(config: RunConfig, cells: Sequence[Cell], num_repeats: int):
    """In this process: the CPU stand-ins, which `app.local` loads, must not touch a real CUDA."""
    import torch

    if not torch.cuda.is_available():
        raise ValueError("--device: got cuda, no CUDA device is visible here; use --device cpu")
    sys.modules["app.local.cpu_megatron"] = types.ModuleType("app.local.cpu_megatron")
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mpu.initialize_model_parallel(
            expert_model_parallel_size=1,
            expert_tensor_parallel_size=1,
            create_gloo_process_groups=False,
        )
        model_parallel_cuda_manual_seed(config.seed)
        return _measure(config, "cuda", list(cells), num_repeats)
    finally:
        dist.destroy_process_group()
