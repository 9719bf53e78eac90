"""GRPO: group-normalised advantages, and the clipped policy loss with an optional KL penalty.

Peer: `policy_loss_function` (slime/backends/megatron_utils/loss.py) and `ppo_utils.py`. One sum
over the optimizer step normalises the loss: response tokens with `calculate_per_token_loss`, else
trajectories, each by the mean of its own tokens. Neither depends on rows or micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from rollout_hooks.trajectory import Trajectory
from train_hooks.micro_batch import MicroBatch, TrainingTrajectory

KL_LOG_RATIO_LIMIT = 10.0
"""slime clamps the estimate of `low_var_kl` to +- this."""

LossFunction = Callable[[torch.Tensor, MicroBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]


def advantages(rewards: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Return float64 `[trajectory]`: (reward - group mean) / (group std + 1e-6)."""
    result = np.zeros(len(rewards))
    for g in np.unique(group):
        members = group == g
        centred = rewards[members] - rewards[members].mean()
        result[members] = centred / (rewards[members].std() + 1e-6)
    return result


def training_trajectory(
    trajectory: Trajectory,
    advantage: float,
    *,
    per_token: bool = True,
    reference: np.ndarray | None = None,
) -> TrainingTrajectory:
    """Attach what the loss reads; position i predicts token i+1, prompts are masked out.

    per_token: every response token weighs 1; else a trajectory's tokens weigh 1 together.
    reference: float `[response token]` log-probs of the reference model, for the KL penalty.
    """
    num_tokens, num_prompt = trajectory.num_tokens, trajectory.num_prompt_tokens
    mask = torch.zeros(max(num_tokens - 1, 0))
    mask[num_prompt - 1 :] = 1.0
    targets = {
        "mask": mask,
        "weight": mask if per_token else mask / mask.sum().clamp_min(1.0),
        "old_log_probs": _of_response(mask, num_prompt, trajectory.logprobs),
        "advantages": mask * advantage,
    }
    if reference is not None:
        targets["reference_log_probs"] = _of_response(mask, num_prompt, reference)
    complete = trajectory.routed is not None and trajectory.start_len == 0
    routed = counts = None
    if complete:
        routed = torch.from_numpy(trajectory.routed.astype(np.int64)).transpose(0, 1).contiguous()
        counts = torch.from_numpy(trajectory.counts.astype(np.int64))
    return TrainingTrajectory(
        tokens=torch.from_numpy(trajectory.tokens.astype(np.int64)),
        routed=routed,
        counts=counts,
        targets=targets,
    )


def _of_response(mask: torch.Tensor, num_prompt: int, values: np.ndarray) -> torch.Tensor:
    """`[t - 1]` with `values` at the positions that predict the response, 0 before."""
    placed = torch.zeros_like(mask)
    placed[num_prompt - 1 :] = torch.from_numpy(np.array(values))
    return placed


def loss_normaliser(trajectories: Sequence[TrainingTrajectory]) -> float:
    """The one sum that normalises an optimizer step: its response tokens, or its trajectories."""
    return float(sum(t.targets["weight"].double().sum() for t in trajectories))


def policy_loss(normaliser: float, ratio_clip: float, kl_coef: float = 0.0) -> LossFunction:
    """Return the loss function of one optimizer step whose weights sum to `normaliser`.

    Each call gives a cell's share of  sum w (max(-ratio A, -clip(ratio) A) + kl_coef KL) /
    normaliser, so the sum over cells does not depend on the schedule. Its metrics are shares too:
    `clip_fraction` counts tokens whose clipped term is the larger one, `kl` is the estimate against
    the reference, 0 without one.
    """

    def loss(log_probs: torch.Tensor, batch: MicroBatch):
        mask, advantage = batch.targets["mask"], batch.targets["advantages"]
        weight = batch.targets["weight"]
        ratio = ((log_probs - batch.targets["old_log_probs"]) * mask).exp()
        plain = -ratio * advantage
        clipped = -ratio.clamp(1 - ratio_clip, 1 + ratio_clip) * advantage
        terms = torch.maximum(plain, clipped) * weight
        kl = torch.zeros_like(terms)
        if "reference_log_probs" in batch.targets:
            kl = low_variance_kl(log_probs, batch.targets["reference_log_probs"]) * weight
            terms = terms + kl_coef * kl
        difference = (log_probs.detach() - batch.targets["old_log_probs"]) * mask

        def share(values: torch.Tensor) -> torch.Tensor:
            return values.detach().double().sum() / normaliser

        metrics = {
            "loss": share(terms),
            "loss_magnitude": share(terms.detach().abs()),
            "clip_fraction": share((clipped > plain) * weight),
            "kl": share(kl),
            "max_log_prob_difference": difference.abs().max(),
        }
        return terms.sum() / normaliser, metrics

    return loss


def low_variance_kl(log_probs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Non-negative estimate of KL(policy | reference) for each sampled token.

    k3 of http://joschu.net/blog/kl-approx.html, slime's `low_var_kl` (`compute_approx_kl`).
    """
    log_ratio = reference - log_probs
    estimate = log_ratio.exp() - 1 - log_ratio
    return estimate.clamp(-KL_LOG_RATIO_LIMIT, KL_LOG_RATIO_LIMIT)
