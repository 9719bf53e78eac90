"""SGLang's expert-distribution dumps: aggregate counts, enough for placement only.

Recorder mode `stat` writes `{rank, logical_count [forward pass, layer, expert],
average_utilization_rate_over_window}`. There are no trajectories in it: the window holds one
pseudo-trajectory, marked as estimated, so rows cannot be planned.
Peer: sglang `python/sglang/srt/eplb/expert_distribution.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from planner.recorded.torch_file import as_array
from planner.window import Window


def sglang_window(
    content: dict[str, Any],
    path: Path,
    *,
    top_k: int | None,
    moe_layers: Sequence[int] | None = None,
    window_id: int = 0,
) -> Window:
    """One window with one pseudo-trajectory that carries the whole demand.

    top_k: experts per token; a dump does not say it.
    moe_layers: layers that are MoE, by configuration; None takes every recorded layer.
    Raises ValueError naming the file for a wrong shape, negative counts, or a layer without any.
    """
    if top_k is None or top_k < 1:
        raise ValueError(f"{path}: an expert-distribution dump does not say top_k; pass top_k")
    if "logical_count" not in content:
        raise ValueError(
            f"{path}: holds records of single passes; record with "
            "--expert-distribution-recorder-mode stat"
        )
    counts = as_array(content["logical_count"], f"{path}: logical_count")
    if counts.ndim == 2:
        counts = counts[None]
    if counts.ndim != 3 or counts.dtype.kind not in "iu" or counts.min(initial=0) < 0:
        raise ValueError(
            f"{path}: logical_count is {counts.dtype} {counts.shape}, expected counts "
            "[pass, layer, expert]"
        )
    layers = tuple(range(counts.shape[1])) if moe_layers is None else tuple(moe_layers)
    if not layers or min(layers) < 0 or max(layers) >= counts.shape[1]:
        raise ValueError(f"{path}: moe_layers {layers} do not fit {counts.shape[1]} layers")
    demand = counts.sum(0, dtype=np.int64)[list(layers)]
    of_layer = demand.sum(1)
    if (of_layer == 0).any():
        layer = layers[int(np.flatnonzero(of_layer == 0)[0])]
        raise ValueError(
            f"{path}: layer {layer} was never routed; leave dense layers out of moe_layers, and "
            "record some traffic"
        )
    rows = max(1, int(of_layer.max()) // top_k)
    return Window(
        window_id=window_id,
        length=np.array([rows]),
        routed_rows=np.array([rows]),
        demand=demand[None],
        top_k=top_k,
        estimated=np.array([True]),
        layer_numbers=layers,
    )
