"""Demand for a trajectory whose capture is missing: the previous window's shares x its rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def demand_shares(demand: NDArray[np.integer]) -> NDArray[np.float64]:
    """Share of each layer's demand that each expert takes over a window.

    demand: `[trajectory, layer, expert]`. Returns `[layer, expert]`; every layer sums to 1, a layer
    without any demand is uniform.
    """
    total = demand.sum(0, dtype=np.int64).astype(np.float64)
    of_layer = total.sum(1, keepdims=True)
    uniform = np.full_like(total, 1.0 / total.shape[1])
    return np.where(of_layer > 0, total / np.maximum(of_layer, 1.0), uniform)


def estimate_counts(
    shares: NDArray[np.floating], num_routed_rows: int, top_k: int
) -> NDArray[np.int32]:
    """Integer demand of one trajectory from expert shares.

    shares: `[layer, expert]`, nonnegative.
    Returns int32 `[layer, expert]`; every layer sums to num_routed_rows x top_k and no expert
    exceeds num_routed_rows, since an expert serves a token once.
    Raises ValueError when a share is negative or not finite, or a layer has none above zero.
    """
    weights = np.asarray(shares, np.float64)
    of_layer = weights.sum(-1, keepdims=True)
    if not np.isfinite(weights).all() or (weights < 0).any() or (of_layer <= 0).any():
        raise ValueError(
            "shares: expected finite, nonnegative values with a positive sum in every layer; pass "
            "demand_shares() of the previous window, or None for uniform shares"
        )
    num_experts = weights.shape[1]
    if num_experts < top_k:
        raise ValueError(f"shares: {num_experts} experts cannot serve a top-{top_k} router")
    exact = np.zeros_like(weights)
    for layer, weight in enumerate(weights / of_layer):
        exact[layer] = _capped(weight, top_k) * num_routed_rows
    counts = np.floor(exact).astype(np.int64)
    left = num_routed_rows * top_k - counts.sum(1)
    order = np.argsort(np.where(counts < num_routed_rows, counts - exact, 1.0), 1, kind="stable")
    for layer, num_left in enumerate(left):
        counts[layer, order[layer, :num_left]] += 1
    return counts.astype(np.int32)


def _capped(weight: NDArray[np.float64], top_k: int) -> NDArray[np.float64]:
    """Expected picks of each expert by one token: weight x top_k, cut at 1, the rest scaled up."""
    full = np.zeros(len(weight), bool)
    while True:
        free = weight[~full].sum()
        picks = np.ones(len(weight))
        left = top_k - full.sum()
        if free > 0:
            picks[~full] = weight[~full] / free * left
        else:
            picks[~full] = left / max(1, (~full).sum())
        over = (picks > 1.0) & ~full
        if not over.any():
            return picks
        full |= over
