"""RoutePack on a cluster: slime's train.py with a planner in the loop.

    python -m app.slime_train --routepack-policy full [--routepack-config FILE] <slime's flags>

The loop is slime's (train.py at 624b824a), line by line; what differs is marked RoutePack. Under
`--routepack-policy off` it is slime's loop with slime's classes. `app.slime_train_async` has the
order of slime's train_async.py.
"""

from __future__ import annotations

from typing import Any

from app.slime.launch import parse_arguments, start_job


def train(args: Any) -> None:
    """Roll out, seal, place, admit, train, hand the weights back."""
    import ray
    from slime.observability.logging_utils import finish_tracking
    from slime.utils.misc import should_run_periodic_action

    job = start_job(args)  # RoutePack: placement groups, manager, planner, actors
    manager, actor_model, critic_model = job.manager, job.actor_model, job.critic_model
    release_train = args.release_train

    if args.offload_rollout and not release_train:
        ray.get(manager.onload_weights.remote())
    actor_model.update_weights()
    if args.check_weight_update_equal:
        ray.get(manager.check_weights.remote(action="compare"))
    if args.offload_rollout:
        ray.get(manager.onload_kv.remote())
    if args.num_rollout == 0 and args.eval_interval is not None:
        ray.get(manager.eval.remote(rollout_id=0))

    for rollout_id in range(args.start_rollout_id, args.num_rollout):
        if args.eval_interval is not None and rollout_id == 0 and not args.skip_eval_before_train:
            ray.get(manager.eval.remote(rollout_id))

        # RoutePack: generate -> seal -> place; rows are searched while the actors load state.
        data = job.rollouts.sealed(job.rollouts.start(rollout_id))

        if args.offload_rollout:
            ray.get(manager.offload.remote())
        if release_train:
            actor_model.create()

        # RoutePack: each actor wakes up, commits the placement, joins the rows, then trains.
        actor_trains = (not args.use_critic) or rollout_id >= args.num_critic_only_steps
        if args.use_critic:
            values = critic_model.async_train(rollout_id, job.rollouts.for_critic(data))
            if actor_trains:
                ray.get(actor_model.async_train(rollout_id, data, external_data=values))
            else:
                ray.get(values)
        else:
            ray.get(actor_model.async_train(rollout_id, data))

        if release_train or should_run_periodic_action(
            rollout_id, args.save_interval, job.num_rollout_per_epoch, args.num_rollout
        ):
            force_sync = release_train or rollout_id == args.num_rollout - 1
            if actor_trains:
                actor_model.save_model(rollout_id, force_sync=force_sync)
            if args.use_critic:
                critic_model.save_model(rollout_id, force_sync=force_sync)
            if args.rollout_global_dataset:
                ray.get(manager.save.remote(rollout_id))

        if not args.offload_train:
            trained = actor_model if not args.use_critic or actor_trains else critic_model
            trained.clear_memory()
        if args.offload_rollout and not release_train:
            ray.get(manager.onload_weights.remote())
        actor_model.update_weights()
        if args.offload_rollout:
            ray.get(manager.onload_kv.remote())

        if should_run_periodic_action(rollout_id, args.eval_interval, job.num_rollout_per_epoch):
            ray.get(manager.eval.remote(rollout_id))

    ray.get(manager.dispose.remote())
    finish_tracking(args)


def main() -> None:
    train(parse_arguments())


if __name__ == "__main__":
    main()
