"""Token-level routing beside a recording: what DeepEP's deduplicated copies are counted from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from planner.recorded.npz import load_npz
from planner.window import Window

_KEYS = ("routed_experts", "cu_seqlens", "sample_index")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenRouting:
    """Routing of some trajectories of one window."""

    routed_experts: np.ndarray
    """[token, layer, top_k] logical expert ids."""
    starts: np.ndarray
    """[trajectory + 1] first token of each trajectory."""
    trajectory: np.ndarray
    """[trajectory] its index in the window."""


def read_token_routing(path: str | Path, window: Window) -> TokenRouting:
    """Read an `.npz` with routed_experts, cu_seqlens and sample_index for trajectories of `window`.

    Raises ValueError when the file is damaged, or its counts differ from the window's demand.
    """
    arrays = load_npz(Path(path))
    absent = [key for key in _KEYS if key not in arrays]
    if absent:
        raise ValueError(f"{path}: holds {sorted(arrays)}, expected token-level routing {_KEYS}")
    routed = np.asarray(arrays["routed_experts"])
    starts = np.asarray(arrays["cu_seqlens"]).astype(np.int64)
    index = np.asarray(arrays["sample_index"]).astype(np.int64)
    if (
        routed.ndim != 3
        or routed.dtype.kind not in "iu"
        or routed.shape[1:] != (window.num_layers, window.top_k)
        or starts.shape != (len(index) + 1,)
        or starts[-1] != len(routed)
        or (np.diff(starts) < 0).any()
    ):
        raise ValueError(
            f"{path}: routed_experts {routed.dtype} {routed.shape} with cu_seqlens {starts.shape} "
            f"does not fit {window.num_layers} MoE layers x top-{window.top_k}"
        )
    if len(index) and not 0 <= index.min() <= index.max() < window.num_trajectories:
        raise ValueError(
            f"{path}: sample_index names trajectory {index.max()}, the window has "
            f"{window.num_trajectories}"
        )
    if routed.size and not 0 <= int(routed.min()) <= int(routed.max()) < window.num_experts:
        raise ValueError(f"{path}: expert id {int(routed.max())} is not below {window.num_experts}")
    for k, i in enumerate(index):
        counts = _counts(routed[starts[k] : starts[k + 1]], window.num_experts)
        if (counts != window.demand[i]).any():
            raise ValueError(
                f"{path}: the counts of sample {i} differ from the recorded window; give the "
                "token-level routing of the same recording"
            )
    return TokenRouting(routed_experts=routed, starts=starts, trajectory=index)


def _counts(routed: np.ndarray, num_experts: int) -> np.ndarray:
    """[layer, expert] routed tokens of routed [token, layer, top_k]."""
    layers = np.arange(routed.shape[1])[None, :, None]
    flat = (layers * num_experts + routed.astype(np.int64)).ravel()
    counts = np.bincount(flat, minlength=routed.shape[1] * num_experts)
    return counts.reshape(routed.shape[1], num_experts)
