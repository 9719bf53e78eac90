"""Start slime's job with RoutePack's manager, planner and actor classes in their places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from app.slime.config import load_slime_config
from app.slime.flags import add_routepack_arguments, prepare_arguments
from app.slime.rollouts import Rollouts


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What the loops of slime_train and slime_train_async work with."""

    manager: Any
    rollouts: Rollouts
    actor_model: Any
    critic_model: Any
    num_rollout_per_epoch: int | None


def parse_arguments() -> Any:
    """slime's arguments with RoutePack's three flags, checked; model plug-ins are registered."""
    from slime.utils.arguments import parse_args

    from app.models import register_models

    register_models()
    args = parse_args(add_custom_arguments=add_routepack_arguments)
    prepare_arguments(args)
    return args


def start_job(args: Any) -> Job:
    """Placement groups, rollout manager, planner, train actors; in slime's order.

    Raises SeamError when slime is not as this version knows it, before anything is started.
    """
    from slime.observability.logging_utils import configure_logger, init_tracking
    from slime.ray import placement_group

    config = load_slime_config(args.routepack_config, output=args.routepack_output)
    off = args.routepack_policy == "off"
    configure_logger()
    planner = actor_cls = None
    if not off:
        import ray

        from app.slime.actor import actor_class
        from app.slime.manager import manager_class
        from app.slime.planner_actor import start_planner
        from app.slime.seams import DRIVER_SEAMS, check

        check(DRIVER_SEAMS)
        import slime.ray.rollout as slime_rollout

        actor_cls = actor_class(config)
        base = slime_rollout.RolloutManager.__ray_metadata__.modified_class
        slime_rollout.RolloutManager = ray.remote(manager_class(base, config))
    groups = placement_group.create_placement_groups(args)
    init_tracking(args)
    manager, num_rollout_per_epoch = placement_group.create_rollout_manager(args, groups["rollout"])
    if not off:
        planner = start_planner(args, config)
    more = {} if actor_cls is None else {"actor_cls": actor_cls}
    actor_model, critic_model = placement_group.create_training_models(
        args, groups, manager, **more
    )
    return Job(
        manager=manager,
        rollouts=Rollouts(args, manager, planner),
        actor_model=actor_model,
        critic_model=critic_model,
        num_rollout_per_epoch=num_rollout_per_epoch,
    )
