"""The reference model of the KL penalty: the starting weights, frozen, in logical order.

slime keeps the reference as a host copy of Megatron's weights (`weights_backuper`, tag `ref`),
loads it into the model for one pass, and lets it route for itself (ROUTING_REPLAY_STAGE
`fallthrough`). Here it is a second transformers model: it has logical experts only, so that no
layout and no move can touch it, and it routes for itself as well.
"""

from __future__ import annotations

import app.local.cpu_megatron  # isort: skip  # noqa: F401  before transformers

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from app.config import RunConfig
from app.local.model import build_hf
from app.local.tokens import PAD
from app.local.warmup import starting_weights
from rollout_hooks.trajectory import Trajectory

BATCH_SIZE = 16


class ReferenceModel:
    """Log-probs under the weights that every run starts from."""

    def __init__(self, config: RunConfig, weights: str):
        self.model = build_hf(config.model, config.routing_skew, config.seed)
        self.model.load_state_dict(starting_weights(weights))
        self.model.requires_grad_(False)

    def log_probs(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        """Float32 `[response token]` of every trajectory; ranks share the work, all get all."""
        rank, world = dist.get_rank(), dist.get_world_size()
        by_length = sorted(range(len(trajectories)), key=lambda i: trajectories[i].num_tokens)
        mine = by_length[rank::world]
        found: dict[int, np.ndarray] = {}
        for first in range(0, len(mine), BATCH_SIZE):
            members = mine[first : first + BATCH_SIZE]
            values = self._batch([trajectories[i] for i in members])
            found.update(zip(members, values, strict=True))
        everyone: list = [None] * world
        dist.all_gather_object(everyone, found)
        merged = {i: values for part in everyone for i, values in part.items()}
        return [merged[i] for i in range(len(trajectories))]

    @torch.inference_mode()
    def _batch(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        longest = max(t.num_tokens for t in trajectories)
        tokens = torch.full((len(trajectories), longest), PAD)
        mask = torch.zeros(len(trajectories), longest, dtype=torch.long)
        for i, trajectory in enumerate(trajectories):
            tokens[i, : trajectory.num_tokens] = torch.from_numpy(
                trajectory.tokens.astype(np.int64)
            )
            mask[i, : trajectory.num_tokens] = 1
        logits = self.model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
        chosen = logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
        return [
            chosen[i, t.num_prompt_tokens - 1 : t.num_tokens - 1].numpy()
            for i, t in enumerate(trajectories)
        ]
