"""Demand of one recorded trajectory from its token-level routing, checked (Section 2.1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def routing_counts(
    routed: NDArray[np.integer], num_experts: int, moe_layers: Sequence[int], name: str
) -> NDArray[np.int64]:
    """Count the routed tokens of each expert, MoE layers only.

    routed: any integer type that holds every id, `[row, layer, top_k]`, all layers of the file.
    moe_layers: which of those layers are MoE, by configuration.
    name: file and sample, for messages.
    Returns int64 `[MoE layer, expert]`; every layer sums to rows x top_k.
    Raises ValueError naming `name` and the layer for an id outside [0, E), an id repeated inside
    one token's top-k, a type too narrow for E, or a wrong shape.
    """
    if routed.ndim != 3 or routed.dtype.kind not in "iu":
        raise ValueError(
            f"{name}: routed experts are {routed.dtype} {routed.shape}, expected integers "
            "[rows, layers, top_k]"
        )
    if np.iinfo(routed.dtype).max < num_experts - 1:
        raise ValueError(
            f"{name}: type {routed.dtype} cannot hold the ids of {num_experts} experts, so they "
            "may have wrapped; record them in a wider type"
        )
    beyond = [layer for layer in moe_layers if not 0 <= layer < routed.shape[1]]
    if beyond:
        raise ValueError(
            f"{name}: moe_layers names layer {beyond[0]}, the recording has {routed.shape[1]}"
        )
    counts = np.empty((len(moe_layers), num_experts), np.int64)
    for i, layer in enumerate(moe_layers):
        ids = np.sort(routed[:, layer].astype(np.int64), axis=1)
        outside = (ids < 0) | (ids >= num_experts)
        if outside.any():
            raise ValueError(
                f"{name}: layer {layer}: expert id {ids[outside][0]} is outside "
                f"[0, {num_experts}); check num_experts"
            )
        repeated = ids[:, 1:] == ids[:, :-1]
        if repeated.any():
            raise ValueError(
                f"{name}: layer {layer}: expert id {ids[:, 1:][repeated][0]} appears twice in one "
                "token's top-k; leave dense layers out of moe_layers"
            )
        counts[i] = np.bincount(ids.ravel(), minlength=num_experts)
    return counts


def smallest_demand(demand: NDArray[np.integer]) -> NDArray[np.integer]:
    """The same counts in uint16 where they fit, else int32."""
    fits = demand.size == 0 or int(demand.max()) <= np.iinfo(np.uint16).max
    return demand.astype(np.uint16 if fits else np.int32)
