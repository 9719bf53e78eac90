"""An `sglang.srt.plugins` plug-in: plain memory for the routed-experts buffer of the host.

SGLang's default registers the buffer with CUDA, which a machine without a GPU cannot do.
Source: sglang/srt/state_capturer/base.py, which looks its allocator up in
sglang/srt/mem_cache/pool_host/common.py `ALLOC_MEMORY_FUNCS`.
"""

from __future__ import annotations


def use_plain_host_memory() -> None:
    """Register an allocator for the device `cpu`; SGLang calls this in each of its processes."""
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    ALLOC_MEMORY_FUNCS["cpu"] = allocate_plain


def allocate_plain(
    dims,
    dtype,
    device,
    pin_memory=False,
    allocator=None,
    registration_granularity_bytes=None,
):
    """Return an unpinned, uninitialised tensor; the last three arguments concern pinning."""
    import torch

    return torch.empty(dims, dtype=dtype, device=device)
