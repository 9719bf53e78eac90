"""GRPO: group-normalised advantages and the clipped policy loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from rollout_hooks.trajectory import Trajectory
from train_hooks.micro_batch import MicroBatch, TrainingTrajectory


def advantages(rewards: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Return float64 `[trajectory]`: (reward - group mean) / (group std + 1e-6)."""
    result = np.zeros(len(rewards))
    for g in np.unique(group):
        members = group == g
        centred = rewards[members] - rewards[members].mean()
        result[members] = centred / (rewards[members].std() + 1e-6)
    return result


def training_trajectory(trajectory: Trajectory, advantage: float) -> TrainingTrajectory:
    """Attach what the loss reads; position i predicts token i+1, prompts are masked out."""
    num_tokens, num_prompt = trajectory.num_tokens, trajectory.num_prompt_tokens
    mask = torch.zeros(max(num_tokens - 1, 0))
    mask[num_prompt - 1 :] = 1.0
    old_log_probs = torch.zeros_like(mask)
    old_log_probs[num_prompt - 1 :] = torch.from_numpy(np.array(trajectory.logprobs))
    complete = trajectory.routed is not None and trajectory.start_len == 0
    routed = counts = None
    if complete:
        routed = torch.from_numpy(trajectory.routed.astype(np.int64)).transpose(0, 1).contiguous()
        counts = torch.from_numpy(trajectory.counts.astype(np.int64))
    return TrainingTrajectory(
        tokens=torch.from_numpy(trajectory.tokens.astype(np.int64)),
        routed=routed,
        counts=counts,
        targets={
            "mask": mask,
            "old_log_probs": old_log_probs,
            "advantages": mask * advantage,
        },
    )


def num_loss_tokens(trajectories: Sequence[TrainingTrajectory]) -> float:
    """Response tokens of the optimizer step: the one sum that normalises the loss."""
    return float(sum(t.targets["mask"].sum() for t in trajectories))


def policy_loss(
    num_tokens: float, ratio_clip: float
) -> Callable[[torch.Tensor, MicroBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Return the loss function of one optimizer step of `num_tokens` response tokens.

    Each call gives a cell's share of  -sum min(ratio A, clip(ratio) A) / num_tokens, so the sum
    over cells does not depend on the schedule.
    """

    def loss(log_probs: torch.Tensor, batch: MicroBatch):
        mask, advantage = batch.targets["mask"], batch.targets["advantages"]
        ratio = ((log_probs - batch.targets["old_log_probs"]) * mask).exp()
        clipped = ratio.clamp(1 - ratio_clip, 1 + ratio_clip)
        terms = -torch.minimum(ratio * advantage, clipped * advantage) * mask
        metrics = {
            "loss": terms.detach().double().sum() / num_tokens,
            "loss_magnitude": terms.detach().double().abs().sum() / num_tokens,
            "max_log_prob_difference": (
                (log_probs.detach() - batch.targets["old_log_probs"]) * mask
            )
            .abs()
            .max(),
            "num_clipped": ((ratio.detach() != clipped.detach()) * mask).sum(),
        }
        return terms.sum() / num_tokens, metrics

    return loss
