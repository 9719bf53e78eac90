"""Rollouts on their way to the trainer: generate, seal, place, rows, as futures in that order."""

from __future__ import annotations

from typing import Any

from app.slime.messages import PlannedRollout


class Rollouts:
    """Starts rollouts and hands them to the trainer; with planner None this is slime's own way.

    All calls about rollout n are submitted to the planner before any about n+1, so the plan of n
    never waits for generate(n+1).
    """

    def __init__(self, args: Any, manager: Any, planner: Any | None):
        self.args, self.manager, self.planner = args, manager, planner

    def start(self, rollout_id: int) -> Any:
        """Begin generate(rollout_id); returns a handle at once."""
        generated = self.manager.generate.remote(rollout_id)
        if self.planner is None:
            return generated
        # No actor commits while only the critic trains, so no experts may move then.
        may_move = not self.args.use_critic or rollout_id >= self.args.num_critic_only_steps
        return PlannedRollout(
            rollout_id=rollout_id,
            planner=self.planner,
            placed=self.planner.place.remote(generated, may_move),
            rows=self.planner.rows.remote(rollout_id),
        )

    def sealed(self, handle: Any) -> Any:
        """Wait until the rollout is generated, sealed and placed; returns what the actor trains on.

        Rows may still be searched: the actor loads state and commits meanwhile.
        """
        import ray

        if self.planner is None:
            return ray.get(handle)
        ray.get(handle.placed)
        return handle

    def for_critic(self, data: Any) -> Any:
        """The same rollout as slime's list of boxes: a critic is left alone."""
        import ray

        return data if self.planner is None else ray.get(data.rows).boxes
