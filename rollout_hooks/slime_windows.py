"""From slime's converted rollout to the planner's windows: one to place on, one a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.window import Window
from rollout_hooks.estimate import estimate_counts
from rollout_hooks.routed_experts import CaptureSpec
from rollout_hooks.slime_steps import split_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class SealedRollout:
    """What leaves the RolloutManager at once: all that planning needs, no token-level data.

    lengths: `[sample]` tokens. demands: int32 `[L, E]` of each sample, None where unknown.
    rollout_ids, groups: `[sample]`. spec: shape of the capture. global_batch_size: rollouts a step.
    parallel: slime's train_parallel_config with the topology of the running job.
    sealed_at: wall clock of sealing, seconds. aux_seconds: rewards and conversion before it.
    num_stale, num_mixed: trajectories of older, of several weight versions.
    """

    rollout_id: int
    lengths: list[int]
    demands: list[NDArray[np.int32] | None]
    rollout_ids: list[int]
    groups: list[int]
    spec: CaptureSpec
    global_batch_size: int
    parallel: dict
    sealed_at: float
    aux_seconds: float = 0.0
    num_stale: int = 0
    num_mixed: int = 0


def windows_of(
    sealed: SealedRollout, shares: NDArray[np.floating] | None
) -> tuple[Window, list[Window], list[np.ndarray]]:
    """The window over all steps, the window of each step, and the sample positions of each step.

    shares: `[layer, expert]` of earlier demand for samples without capture; None is uniform.
    Window ids: the rollout id for the whole, rollout id x steps + step for a step, so that the
    shuffle of the base policy differs from step to step.
    """
    steps = split_steps(sealed.rollout_ids, sealed.global_batch_size)
    shape = (sealed.spec.num_moe_layers, sealed.spec.num_experts)
    weights = np.ones(shape) if shares is None else shares
    rows = np.maximum(np.array(sealed.lengths, np.int64) - 1, 0)
    estimated = np.array([demand is None for demand in sealed.demands])
    demand = np.stack(
        [
            estimate_counts(weights, int(rows[i]), sealed.spec.top_k) if known is None else known
            for i, known in enumerate(sealed.demands)
        ]
    )
    everything = Window(
        window_id=sealed.rollout_id,
        length=np.array(sealed.lengths, np.int64),
        routed_rows=rows,
        demand=demand,
        top_k=sealed.spec.top_k,
        group=np.array(sealed.groups, np.int64),
        estimated=estimated,
        layer_numbers=sealed.spec.moe_layers,
    )
    whole = everything.select(np.concatenate(steps))
    of_step = [_renumbered(everything.select(step), k, steps) for k, step in enumerate(steps)]
    return whole, of_step, steps


def _renumbered(window: Window, step: int, steps: Sequence[np.ndarray]) -> Window:
    return Window(
        window_id=window.window_id * len(steps) + step,
        length=window.length,
        routed_rows=window.routed_rows,
        demand=window.demand,
        top_k=window.top_k,
        group=window.group,
        estimated=window.estimated,
        layer_numbers=window.layer_numbers,
    )
