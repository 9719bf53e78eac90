"""Seal the trajectories of one optimizer step into the planner's window (Section 2.1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.window import Window
from rollout_hooks.estimate import estimate_counts
from rollout_hooks.routed_experts import CaptureError, CaptureSpec
from rollout_hooks.trajectory import MISSING_HELP, Missing, Trajectory


def seal(
    trajectories: Sequence[Trajectory],
    window_id: int,
    spec: CaptureSpec,
    previous_shares: NDArray[np.floating] | None = None,
    missing: Missing = "error",
) -> Window:
    """Stack the demand of all trajectories, estimating what was not captured.

    trajectories: in arrival order, which the base schedule depends on.
    previous_shares: `demand_shares` of the previous window `[layer, expert]`; None is uniform.
    missing: `error` refuses a trajectory without capture; `estimate` gives it the previous shares
        x its routed rows and marks it in `Window.estimated`.
    Returns a window whose demand takes N x L x E x 2 bytes (x 4 above 65535 rows); token-level
    routing is not copied.
    Raises CaptureError naming the sample for a missing capture under `error`, demand of a wrong
    shape, or demand whose layers do not sum to routed rows x top_k; ValueError for no trajectories
    or previous shares of a wrong shape.
    """
    if not trajectories:
        raise ValueError("trajectories: got none; a window needs at least one trajectory")
    if missing not in ("error", "estimate"):
        raise ValueError(f"missing: expected 'error' or 'estimate', got {missing!r}")
    shape = (spec.num_moe_layers, spec.num_experts)
    shares = np.ones(shape) if previous_shares is None else np.asarray(previous_shares)
    if shares.shape != shape:
        raise ValueError(
            f"previous_shares: shape {shares.shape}, expected {shape}; it must come from a window "
            "of the same model"
        )
    length = np.array([t.num_tokens for t in trajectories], np.int64)
    routed_rows = np.array([t.num_routed_rows for t in trajectories], np.int64)
    estimated = np.array([t.counts is None for t in trajectories])
    narrow = np.uint16 if routed_rows.max() <= np.iinfo(np.uint16).max else np.int32
    demand = np.empty((len(trajectories), *shape), narrow)
    for i, trajectory in enumerate(trajectories):
        if trajectory.counts is not None:
            demand[i] = _checked(trajectory, spec)
        elif missing == "error":
            raise CaptureError(
                f"sample {trajectory.sample_id}: no capture ({estimated.sum()} of "
                f"{len(trajectories)} trajectories lack one); {MISSING_HELP}"
            )
        else:
            demand[i] = estimate_counts(shares, trajectory.num_routed_rows, spec.top_k)
    return Window(
        window_id=window_id,
        length=length,
        routed_rows=routed_rows,
        demand=demand,
        top_k=spec.top_k,
        group=np.array([t.group for t in trajectories], np.int64),
        estimated=estimated,
        layer_numbers=spec.moe_layers,
    )


def capture_coverage(window: Window) -> float:
    """Fraction of a window's routed rows whose demand was captured, not estimated."""
    total = int(window.routed_rows.sum())
    return float(window.routed_rows[~window.estimated].sum() / total) if total else 1.0


def _checked(trajectory: Trajectory, spec: CaptureSpec) -> NDArray[np.int32]:
    """The demand of one trajectory after checking it sums to routed rows x top_k in each layer."""
    counts = trajectory.counts
    assert counts is not None
    shape = (spec.num_moe_layers, spec.num_experts)
    if counts.shape != shape:
        raise CaptureError(
            f"sample {trajectory.sample_id}: demand has shape {counts.shape}, expected {shape}"
        )
    expected = trajectory.num_routed_rows * spec.top_k
    of_layer = counts.sum(1, dtype=np.int64)
    wrong = np.flatnonzero(of_layer != expected)
    if wrong.size:
        layer = int(wrong[0])
        raise CaptureError(
            f"sample {trajectory.sample_id}: layer {spec.moe_layers[layer]}: demand sums to "
            f"{of_layer[layer]}, expected {expected} ({trajectory.num_routed_rows} rows x top-"
            f"{spec.top_k}); count real rows only, without padding"
        )
    if counts.min() < 0 or counts.max() > trajectory.num_routed_rows:
        raise CaptureError(
            f"sample {trajectory.sample_id}: an expert has demand outside "
            f"[0, {trajectory.num_routed_rows}]; an expert serves a token at most once"
        )
    return counts
