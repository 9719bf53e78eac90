"""RoutePack with asynchronous rollouts: slime's train_async.py with a planner in the loop.

    python -m app.slime_train_async --routepack-policy full <slime's flags>

generate(n+1) runs while n trains. Plans chain from the last emitted one, and the planner is an
actor of its own, so neither the placement nor the rows of n wait for generate(n+1).
"""

from __future__ import annotations

from typing import Any

from app.slime.launch import parse_arguments, start_job


def train(args: Any) -> None:
    """slime's asynchronous loop; what differs from train_async.py is marked RoutePack."""
    import ray
    from slime.observability.logging_utils import finish_tracking
    from slime.utils.misc import should_run_periodic_action

    if args.colocate:
        raise ValueError("--colocate is not supported for asynchronous training: use slime_train")
    job = start_job(args)  # RoutePack
    manager, actor_model, critic_model = job.manager, job.actor_model, job.critic_model
    rollouts, release_train = job.rollouts, args.release_train

    actor_model.update_weights()
    if args.check_weight_update_equal:
        ray.get(manager.check_weights.remote(action="compare"))

    upcoming = rollouts.start(args.start_rollout_id)  # RoutePack: generate -> place -> rows
    data = None
    for rollout_id in range(args.start_rollout_id, args.num_rollout):
        if upcoming is not None:
            data = rollouts.sealed(upcoming)
        if rollout_id + 1 < args.num_rollout:
            upcoming = rollouts.start(rollout_id + 1)

        if release_train:
            actor_model.create()

        actor_trains = (not args.use_critic) or rollout_id >= args.num_critic_only_steps
        if args.use_critic:
            values = critic_model.async_train(rollout_id, rollouts.for_critic(data))
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

        if release_train or (rollout_id + 1) % args.update_weights_interval == 0:
            # No weight update in the middle of a generation: wait for it first.
            data = None if upcoming is None else rollouts.sealed(upcoming)
            upcoming = None
            actor_model.update_weights()

        if should_run_periodic_action(rollout_id, args.eval_interval, job.num_rollout_per_epoch):
            ray.get(manager.eval.remote(rollout_id))

    ray.get(manager.dispose.remote())
    finish_tracking(args)


def main() -> None:
    train(parse_arguments())


if __name__ == "__main__":
    main()
