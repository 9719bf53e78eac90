"""Sample one window: prompts on every rank, capture as each response completes, one seal."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch.distributed as dist

from app.config import ModelConfig, RunConfig
from app.local.engine import RolloutEngine
from app.local.tasks import draw_task, reward
from planner.window import Window
from rollout_hooks.routed_experts import CaptureSpec
from rollout_hooks.seal import seal
from rollout_hooks.trajectory import Trajectory, from_response


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledWindow:
    """A sealed window with its trajectories, alike on every rank, in arrival order.

    rewards: float64 `[trajectory]`. families: task family of each trajectory.
    """

    window: Window
    trajectories: list[Trajectory]
    rewards: np.ndarray
    families: list[str]


def capture_spec(model: ModelConfig) -> CaptureSpec:
    """What a capture of `model` looks like."""
    return CaptureSpec(
        num_hidden_layers=model.num_layers,
        moe_layers=model.moe_layers,
        num_experts=model.num_experts,
        top_k=model.top_k,
    )


def sample_window(
    config: RunConfig,
    engine: RolloutEngine,
    window_id: int,
    previous_shares: np.ndarray | None = None,
) -> SampledWindow:
    """Sample this rank's groups, exchange trajectories, and seal; collective over all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rollout = config.rollout
    spec = capture_spec(config.model)
    num_local = rollout.num_groups // world
    rng = np.random.default_rng([config.seed, window_id, rank])
    tasks = [draw_task(config.tasks, rng) for _ in range(num_local)]
    engine.generator.manual_seed(int(rng.integers(2**62)))
    repeated = [(g, task) for g, task in enumerate(tasks) for _ in range(rollout.group_size)]
    prompts = [task.prompt for _, task in repeated]
    responses = engine.generate(prompts, rollout.max_new_tokens, rollout.capture)
    mine = []
    for index, ((g, task), response) in enumerate(zip(repeated, responses)):
        trajectory = from_response(
            response,
            task.prompt,
            rank * num_local + g,
            spec,
            rollout.missing_capture,
            sample_id=f"w{window_id}/r{rank}/{index}",
        )
        score = reward(task, trajectory.tokens[trajectory.num_prompt_tokens :])
        mine.append((replace(trajectory, reward=score), task.family))
    everyone: list = [None] * world
    dist.all_gather_object(everyone, mine)
    gathered = [entry for entries in everyone for entry in entries]
    trajectories = [trajectory for trajectory, _ in gathered]
    return SampledWindow(
        window=seal(trajectories, window_id, spec, previous_shares, rollout.missing_capture),
        trajectories=trajectories,
        rewards=np.array([t.reward for t in trajectories], dtype=np.float64),
        families=[family for _, family in gathered],
    )
