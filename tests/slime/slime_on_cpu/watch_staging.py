"""What a sleeping actor still holds of RoutePack's staging, by the memory itself.

One line of `staging-{pid}.jsonl` under ROUTEPACK_TEST_OUTPUT for each sleep: bytes reserved since
the start and bytes whose memory lives, be it in a view that something else has kept.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

from torch.multiprocessing.reductions import StorageWeakRef

_reserved: dict[int, tuple[StorageWeakRef, int]] = {}


def patch(module) -> None:
    """Have `train_hooks.staging` tell of each buffer."""
    reserve = module.Staging.reserve

    @functools.wraps(reserve)
    def reserve_and_remember(self, name, lane, num_bytes):
        buffer = reserve(self, name, lane, num_bytes)
        known = StorageWeakRef(buffer.untyped_storage())
        _reserved[known.cdata] = known, buffer.numel()
        return buffer

    module.Staging.reserve = reserve_and_remember


def write() -> None:
    """Called when memory is to be paused."""
    held = sum(size for storage, size in _reserved.values() if not storage.expired())
    line = {"reserved": sum(size for _, size in _reserved.values()), "held": held}
    path = Path(os.environ["ROUTEPACK_TEST_OUTPUT"]) / f"staging-{os.getpid()}.jsonl"
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
