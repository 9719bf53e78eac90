"""The optimizer steps of one rollout: which trajectories each trains, as a window of its own.

Whole GRPO groups stay in one step, in arrival order, as in slime (`rollout_hooks.slime_steps`).
Where the groups do not divide, later steps hold one group less: the last window may be short.
"""

from __future__ import annotations

import app.local.cpu_megatron  # isort: skip  # noqa: F401  before megatron

from collections.abc import Sequence

import numpy as np

from app.config import RunConfig
from app.local.grpo import LossFunction
from app.local.trainer import StepResult, grpo_step_inputs
from planner.plan import Plan
from planner.window import Window
from rollout_hooks.trajectory import Trajectory
from train_hooks.micro_batch import MicroBatch


def split_steps(group: np.ndarray, num_steps: int) -> list[np.ndarray]:
    """Positions of each step's trajectories, int64, ascending; `group` is `[trajectory]`.

    Raises ValueError when there are fewer groups than steps.
    """
    names, first = np.unique(group, return_index=True)
    if len(names) < num_steps:
        raise ValueError(
            f"{len(names)} groups make no {num_steps} optimizer steps: lower "
            "train.num_steps_per_rollout or raise rollout.num_groups"
        )
    arrival = names[np.argsort(first)]
    return [np.flatnonzero(np.isin(group, part)) for part in np.array_split(arrival, num_steps)]


def step_windows(window: Window, steps: list[np.ndarray]) -> list[Window]:
    """The window of each step; ids count steps, so that base shuffles every step anew."""
    if len(steps) == 1:
        return [window]
    selected = [window.select(positions) for positions in steps]
    return [
        Window(
            window_id=window.window_id * len(steps) + step,
            length=part.length,
            routed_rows=part.routed_rows,
            demand=part.demand,
            top_k=part.top_k,
            group=part.group,
            estimated=part.estimated,
            layer_numbers=part.layer_numbers,
        )
        for step, part in enumerate(selected)
    ]


def rollout_inputs(
    config: RunConfig,
    trajectories: Sequence[Trajectory],
    advantage: np.ndarray,
    plans: Sequence[Plan],
    positions: Sequence[np.ndarray],
    reference: Sequence[np.ndarray] | None = None,
) -> list[tuple[list[MicroBatch], LossFunction]]:
    """`grpo_step_inputs` of every optimizer step of a rollout, under the configured loss.

    positions: of each step's trajectories within the rollout.
    Old log-probs are the sampler's, taken once for the rollout; so ratios leave 1, and clipping
    can fire, from the second step on.
    """
    train = config.train
    return [
        grpo_step_inputs(
            [trajectories[i] for i in members],
            advantage[members],
            plan,
            train.ratio_clip,
            per_token=train.calculate_per_token_loss,
            kl_coef=train.kl_loss_coef,
            reference=None if reference is None else [reference[i] for i in members],
            padding_multiple=train.data_pad_size_multiplier,
        )
        for plan, members in zip(plans, positions, strict=True)
    ]


def combined(steps: Sequence[StepResult]) -> StepResult:
    """All optimizer steps of a rollout as one result: sums of time and positions, means of the
    rest, the largest log-prob difference of the first step; rows one after the other."""
    return StepResult(
        loss=float(np.mean([s.loss for s in steps])),
        loss_magnitude=float(np.mean([s.loss_magnitude for s in steps])),
        max_log_prob_difference=steps[0].max_log_prob_difference,
        clip_fraction=float(np.mean([s.clip_fraction for s in steps])),
        kl=float(np.mean([s.kl for s in steps])),
        num_positions=sum(s.num_positions for s in steps),
        seconds=sum(s.seconds for s in steps),
        grad_norm=float(np.mean([s.grad_norm for s in steps])),
        row_seconds=np.concatenate([s.row_seconds for s in steps]),
    )
