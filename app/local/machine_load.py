"""What else used the machine while ranks were timed (definitions.md, Paired comparison)."""

from __future__ import annotations

import psutil
import torch
import torch.distributed as dist


def cpu_seconds() -> tuple[float, float]:
    """Busy CPU seconds of the machine, and of this rank."""
    busy = psutil.cpu_times()
    mine = psutil.Process().cpu_times()
    return busy.user + busy.system, mine.user + mine.system


def other_load(before: tuple[float, float], elapsed: float) -> float:
    """Cores that something other than the ranks kept busy, on average."""
    busy, mine = cpu_seconds()
    own = torch.tensor(mine - before[1], dtype=torch.float64)
    dist.all_reduce(own)
    return max(0.0, (busy - before[0] - own.item()) / elapsed)
