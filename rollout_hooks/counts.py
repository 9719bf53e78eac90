"""Reduce the token-level routing of one trajectory to its demand A_i `[L, E]` (Section 2.1).

This runs once per trajectory, as it completes: afterwards the planner needs L x E x 4 bytes of it
instead of rows x L x top_k ids. It does not hold the GIL.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray


def count(
    routed: NDArray[np.integer], num_experts: int, *, num_rows: int | None = None
) -> NDArray[np.int32]:
    """Count how many routed tokens each expert of each layer receives.

    routed: ids in [0, E), `[row, layer, top_k]`; checked by `routed_experts.compact`.
    num_rows: rows of real positions; the rows after them are padding and are never counted.
    Returns int32 `[layer, expert]`; every layer sums to num_rows x top_k.
    Raises ValueError for a wrong shape, more real rows than there are, or an id outside [0, E).
    """
    if routed.ndim != 3 or routed.dtype.kind not in "iu":
        raise ValueError(
            f"routed: expected integers [rows, layers, top_k], got {routed.dtype} {routed.shape}"
        )
    rows = routed.shape[0] if num_rows is None else num_rows
    if not 0 <= rows <= routed.shape[0]:
        raise ValueError(f"num_rows: expected 0 to {routed.shape[0]}, got {num_rows}")
    out = np.zeros((routed.shape[1], num_experts), np.int32)
    if not _count(routed[:rows], out):
        raise ValueError(
            f"routed: an expert id is outside [0, {num_experts}); pass the output of compact(), "
            "which names the sample and layer"
        )
    return out


@njit(cache=True, nogil=True)
def _count(routed, out):  # type: ignore[no-untyped-def]
    """Add each id to out[layer, id]; False at the first id outside [0, E)."""
    num_rows, num_layers, top_k = routed.shape
    num_experts = out.shape[1]
    for row in range(num_rows):
        for layer in range(num_layers):
            for k in range(top_k):
                expert = np.int64(routed[row, layer, k])
                if expert < 0 or expert >= num_experts:
                    return False
                out[layer, expert] += 1
    return True


def _count_numpy(routed: NDArray[np.integer], out: NDArray[np.int32]) -> bool:
    """Plain twin of `_count`, one bincount over (layer, expert) pairs."""
    num_layers, num_experts = out.shape
    ids = routed.astype(np.int64)
    if ids.size and (ids.min() < 0 or ids.max() >= num_experts):
        return False
    pairs = ids + np.arange(num_layers)[None, :, None] * num_experts
    out += np.bincount(pairs.ravel(), minlength=out.size).reshape(out.shape).astype(np.int32)
    return True
