"""slime's train actor with RoutePack: commit before the first forward, rows joined after it.

Peer: `MegatronTrainRayActor` (slime/backends/megatron_utils/actor.py). Its order of work stays:
wake up -> fetch data -> fill replay -> reference and actor log-probs -> train -> back up. The
commit sits where data is fetched: after the wake-up, before any forward, while rows are still
searched.
"""

from __future__ import annotations

import time

from app.slime.clock import Marks, table_10
from app.slime.config import SlimeConfig
from app.slime.messages import Placed, PlannedRollout, Ready
from app.slime.rank_report import RankReport
from planner.policies import POLICIES


def actor_class(config: SlimeConfig) -> type:
    """A subclass of MegatronTrainRayActor for slime's `actor_cls=` parameter.

    Raises SeamError in the train process when slime is not as this version knows it.
    """
    from slime.backends.megatron_utils.actor import MegatronTrainRayActor

    class RoutePackTrainActor(MegatronTrainRayActor):
        def init(self, args, role, with_ref=False, with_opd_teacher=False):
            from app.models import register_models
            from app.slime.seams import ACTOR_SEAMS, check, dispatcher_seams

            check(ACTOR_SEAMS)
            if POLICIES[args.routepack_policy].places:
                check(dispatcher_seams(args))
            register_models()
            self._routepack_attached, self._routepack_moves = False, None
            self._routepack_restore = None
            self._routepack_saving = False
            self._routepack_report = RankReport(args, config)
            start = super().init(args, role, with_ref, with_opd_teacher)
            self._routepack_attach()
            return start

        def _routepack_attach(self):
            """Once, when the model stands and process groups are alive (before a first sleep)."""
            if self._routepack_attached:
                return
            self._routepack_attached = True
            from app.slime.executed import ExecutedDemand
            from app.slime.expert_moves import ExpertMoves
            from app.slime.job import job_facts

            self.train_parallel_config["routepack"] = job_facts(
                self.args, self.train_parallel_config
            )
            layout = None
            if POLICIES[self.args.routepack_policy].places:  # else nothing of the model is touched
                self._routepack_moves = ExpertMoves(
                    self.args,
                    self.model,
                    self.optimizer,
                    self.weights_backuper,
                    self.weight_updater,
                    config.commit,
                )
                layout = self._routepack_moves.layout
            self._routepack_executed = ExecutedDemand(layout)
            self._routepack_report.time_training(self._routepack_executed.counting)

        def sleep(self):
            self._routepack_attach()
            if self._routepack_restore is not None and not self.args.async_save:
                self._routepack_back_after_save()
            if self._routepack_moves is not None:
                self._routepack_moves.release()
            super().sleep()

        def wake_up(self):
            super().wake_up()
            if self._routepack_moves is None:
                return
            self._routepack_moves.warm()
            if self._routepack_saving:
                self._routepack_to_identity()

        def _routepack_to_identity(self):
            self._routepack_restore = self._routepack_moves.to_identity(self._active_model_tag)

        def train(self, rollout_id: int, rollout_data_ref: PlannedRollout, external_data=None):
            self._routepack_state_started = time.time()
            return super().train(rollout_id, rollout_data_ref, external_data=external_data)

        def _get_rollout_data(self, rollout_data_ref: PlannedRollout):
            import ray

            placed: Placed = ray.get(rollout_data_ref.placed)
            moves = self._routepack_moves
            self._routepack_executed.wanted = placed.estimated and moves is not None
            commit = self._routepack_commit(placed)
            state_ended = time.time()
            ready: Ready = ray.get(rollout_data_ref.rows)
            rows_at = time.time()
            data = super()._get_rollout_data(ready.boxes)
            if placed.routing is not None:
                from train_hooks.slime_replay import own_routing

                partition = data["partition"]
                data["rollout_routed_experts"] = own_routing(placed.routing, partition, ray.get)
            marks = Marks(
                sealed_at=placed.sealed_at,
                aux_seconds=placed.aux_seconds,
                placed_at=placed.placed_at,
                schedule_started_at=ready.schedule_started_at,
                schedule_ended_at=ready.schedule_ended_at,
                state_started_at=self._routepack_state_started,
                state_ended_at=state_ended,
                commit_seconds=commit["seconds"],
                rows_at=rows_at,
            )
            self._routepack_rollout = rollout_data_ref, placed, table_10(marks), commit
            return data

        def _routepack_commit(self, placed: Placed) -> dict[str, float]:
            moves = self._routepack_moves
            if moves is None or not moves.needs(placed.placement):
                return {"seconds": 0.0, "moved": 0.0, "bytes": 0.0}
            return moves.commit(
                placed.placement,
                placed.layer_numbers,
                placed.base_version,
                placed.digest,
                self._active_model_tag,
            )

        def train_actor(self, rollout_id, rollout_data, external_data=None):
            started = time.time()
            super().train_actor(rollout_id, rollout_data, external_data=external_data)
            rollout, placed, times, commit = self._routepack_rollout
            del self._routepack_rollout
            executed = self._routepack_executed.take(placed.layer_numbers)
            self._routepack_report.log(
                rollout, placed, times, commit, seconds=time.time() - started, executed=executed
            )

        def save_model(self, rollout_id, force_sync=False):
            if self.args.debug_rollout_only or self._routepack_moves is None:
                super().save_model(rollout_id, force_sync=force_sync)
                return
            self._routepack_saving = True
            try:
                if not self.args.offload_train:
                    self._routepack_to_identity()
                super().save_model(rollout_id, force_sync=force_sync)
                self._routepack_save_layout()
                if self.args.async_save:
                    self._routepack_stay_until_saved()
                elif self._routepack_restore is not None:
                    self._routepack_back_after_save()
            finally:
                self._routepack_saving = False

        def _routepack_back_after_save(self):
            restore, self._routepack_restore = self._routepack_restore, None
            self._routepack_moves.back(restore, self._active_model_tag)

        def _routepack_stay_until_saved(self):
            """An asynchronous save may still read CPU tensors: the next move waits for its end.

            Experts stay in logical order until then; that move goes straight to its plan.
            """
            from megatron.training.async_utils import maybe_finalize_async_save

            self._routepack_restore = None
            self._routepack_moves.committer.before_next_move = lambda: maybe_finalize_async_save(
                blocking=True
            )

        def _routepack_save_layout(self):
            from train_hooks.checkpoint import save_layout

            placement = self._routepack_restore or self._routepack_moves.whole
            if self._rank == 0 and placement is not None and self.args.save:
                save_layout(self.args.save, placement)

    return RoutePackTrainActor
