"""The two kernel functions that SGLang 0.5.23 calls on a CPU without AMX, in plain torch.

Sources: sglang/srt/mem_cache/allocation.py (`assign_req_to_token_pool_cpu`) and
sglang/kernels/ops/kvcache/cache_move.py (`copy_all_layer_kv_cache_cpu`). Without AMX everything
else in SGLang takes its `forward_native` path.
"""

from __future__ import annotations

import ctypes

import torch


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write consecutive cache locations into each request's row, in place.

    req_pool_indices, start_offset, end_offset: `[request]`. req_to_token: `[pool row, pool_len]`.
    out_cache_loc: `[sum of (end - start)]`, request after request.
    """
    ranges = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist())
    taken = 0
    for row, start, end in ranges:
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start]
        taken += end - start


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Copy cache rows `src_loc` to `tgt_loc` in every layer's buffer; all reads precede all writes.

    data_ptrs: `[buffer]` addresses. strides: `[buffer]` bytes of a row. src_loc, tgt_loc: `[row]`.
    """
    sources, targets = src_loc.tolist(), tgt_loc.tolist()
    for base, stride in zip(data_ptrs.tolist(), strides.tolist()):
        rows = [ctypes.string_at(base + source * stride, stride) for source in sources]
        for target, row in zip(targets, rows):
            ctypes.memmove(base + target * stride, row, stride)


def __getattr__(name: str):
    """Any other `*_cpu` kernel can be imported, as speculative decoding does, but not called."""
    if not name.endswith("_cpu"):
        raise AttributeError(f"module 'sgl_kernel' has no attribute {name!r}")

    def not_here(*args, **kwargs):
        raise NotImplementedError(
            f"sgl_kernel.{name}: no stand-in for this CPU kernel; switch the SGLang feature off "
            "that calls it (speculative decoding, AMX attention, quantization)"
        )

    return not_here
