"""Every place where RoutePack touches slime, checked by name and signature before anything starts.

slime has no stable API for these; an unknown version is refused here instead of failing later.
Known good: slime 624b824a (v0.3.1+38).
"""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

KNOWN = "624b824a"
_UPDATE = "slime.backends.megatron_utils.update_weight"


class SeamError(RuntimeError):
    """slime is not as this version of RoutePack knows it; the message names the seam."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seam:
    """One attribute of slime: its parameters (in order, self included), or names its code uses."""

    module: str
    name: str
    parameters: tuple[str, ...] | None = None
    uses: tuple[str, ...] = ()


DRIVER_SEAMS = (
    Seam(module="slime.utils.arguments", name="parse_args", parameters=("add_custom_arguments",)),
    Seam(
        module="slime.utils.dp_schedule",
        name="build_dp_schedule",
        parameters=(
            "args",
            "train_parallel_config",
            "total_lengths",
            "global_batch_size",
            "rollout_indices",
        ),
    ),
    Seam(
        module="slime.ray.placement_group",
        name="create_rollout_manager",
        parameters=("args", "pg"),
        uses=("RolloutManager",),
    ),
    Seam(
        module="slime.ray.placement_group",
        name="create_training_models",
        parameters=("args", "pgs", "rollout_manager", "actor_cls"),
    ),
    Seam(
        module="slime.ray.rollout",
        name="RolloutManager.set_train_parallel_config",
        parameters=("self", "config"),
        uses=("train_parallel_config",),
    ),
    Seam(
        module="slime.ray.rollout",
        name="RolloutManager._convert_samples_to_train_data",
        parameters=("self", "samples"),
    ),
    Seam(
        module="slime.ray.rollout",
        name="RolloutManager._split_train_data_by_dp",
        parameters=("self", "data"),
        uses=("build_dp_schedule", "train_parallel_config", "args"),
    ),
)
ACTOR = "slime.backends.megatron_utils.actor"
ACTOR_SEAMS = (
    Seam(
        module=ACTOR,
        name="MegatronTrainRayActor.init",
        parameters=("self", "args", "role", "with_ref", "with_opd_teacher"),
    ),
    Seam(
        module=ACTOR,
        name="MegatronTrainRayActor.train",
        parameters=("self", "rollout_id", "rollout_data_ref", "external_data"),
        uses=("_get_rollout_data", "train_actor", "wake_up"),
    ),
    Seam(
        module=ACTOR,
        name="MegatronTrainRayActor.train_actor",
        parameters=("self", "rollout_id", "rollout_data", "external_data"),
        uses=("train", "weights_backuper", "_switch_model", "fill_routing_replay"),
    ),
    Seam(
        module=ACTOR,
        name="MegatronTrainRayActor._get_rollout_data",
        parameters=("self", "rollout_data_ref"),
    ),
    Seam(module=ACTOR, name="MegatronTrainRayActor.sleep", parameters=("self",)),
    Seam(
        module=ACTOR,
        name="MegatronTrainRayActor.wake_up",
        parameters=("self",),
        uses=("_switch_model",),
    ),
    Seam(
        module=ACTOR,
        name="MegatronTrainRayActor.update_weights",
        parameters=("self",),
        uses=("reload_process_groups", "weight_updater", "update_weights"),
    ),
    Seam(
        module=ACTOR,
        name="MegatronTrainRayActor._switch_model",
        parameters=("self", "target_tag"),
        uses=("weights_backuper", "_active_model_tag"),
    ),
    Seam(
        module=ACTOR,
        name="MegatronTrainRayActor.save_model",
        parameters=("self", "rollout_id", "force_sync"),
        uses=("save", "save_hf_model_to_path"),
    ),
    Seam(
        module=ACTOR,
        name="train",
        parameters=(
            "rollout_id",
            "model",
            "optimizer",
            "opt_param_scheduler",
            "data_iterator",
            "num_microbatches",
            "global_batch_sizes",
        ),
    ),
    Seam(
        module=f"{_UPDATE}.common",
        name="_named_params_and_buffers_global",
        parameters=("args", "model"),
    ),
    Seam(
        module=f"{_UPDATE}.common",
        name="named_params_and_buffers",
        uses=("_named_params_and_buffers_global",),
    ),
    Seam(
        module="slime.utils.tensor_backper",
        name="_TensorBackuperNormal.__init__",
        parameters=("self", "source_getter"),
        uses=("_backups",),
    ),
    Seam(
        module=f"{_UPDATE}.update_weight_from_tensor",
        name="UpdateWeightFromTensor.__init__",
        uses=("_full_param_info_buckets", "_hf_weight_iterator", "weights_getter"),
    ),
    Seam(
        module=f"{_UPDATE}.expert_routing",
        name="configure_expert_routing",
        parameters=(
            "args",
            "full_param_info_buckets",
            "get_local_weight_names",
            "engine_gpu_counts",
            "engine_gpu_offsets",
            "engine_parallel_configs",
            "use_distribute",
        ),
    ),
    Seam(
        module="slime.observability.logging_utils",
        name="log",
        parameters=("args", "metrics", "step_key"),
    ),
)

DISPATCHERS = {
    backend: Seam(
        module="megatron.core.transformer.moe.token_dispatcher",
        name=f"{manager}.setup_metadata",
        parameters=("self", "routing_map", "probs"),
    )
    for backend, manager in (("deepep", "_DeepepManager"), ("hybridep", "_HybridEPManager"))
}
"""Flex dispatchers that take the router's dense map `[token, expert]`, as the layout permutes it.

One that took ordered top-k expert ids instead would send tokens to the wrong slots.
"""


def dispatcher_seams(args: Any) -> tuple[Seam, ...]:
    """What a job's token dispatcher must look like; SeamError for a flex backend not known here."""
    if getattr(args, "moe_token_dispatcher_type", None) != "flex":
        return ()
    old_flag = getattr(args, "moe_enable_deepep", False)
    backend = "deepep" if old_flag else getattr(args, "moe_flex_dispatcher_backend", None)
    if backend not in DISPATCHERS:
        raise SeamError(
            f"--moe-flex-dispatcher-backend {backend}: RoutePack knows {', '.join(DISPATCHERS)}, "
            "which take the router's dense map; use one of them, --moe-token-dispatcher-type "
            "alltoall, or --routepack-policy reschedule, which moves no experts"
        )
    return (DISPATCHERS[backend],)


def find(seam: Seam) -> Any:
    """The function of a seam, without Ray's wrappers. Raises SeamError when it is not there."""
    try:
        found: Any = importlib.import_module(seam.module)
        for part in seam.name.split("."):
            metadata = getattr(found, "__ray_metadata__", None)
            found = getattr(found if metadata is None else metadata.modified_class, part)
    except (ImportError, AttributeError) as error:
        raise SeamError(_refusal(seam, f"is not there ({error})")) from error
    return inspect.unwrap(found)


def check(seams: Sequence[Seam]) -> None:
    """Raise SeamError naming the first seam that is missing or different."""
    for seam in seams:
        function = find(seam)
        if seam.parameters is not None:
            code = function.__code__  # Ray adds a parameter to __signature__
            got = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            if got != seam.parameters:
                raise SeamError(_refusal(seam, f"takes {got}, expected {seam.parameters}"))
        used = _names(function.__code__) if seam.uses else set()
        missing = [name for name in seam.uses if name not in used]
        if missing:
            raise SeamError(_refusal(seam, f"no longer uses {missing}"))


def with_globals(function: Callable, **names: Any) -> Callable:
    """A copy of `function` that sees `names` in place of its module's; nothing is patched."""
    function = inspect.unwrap(function)
    copy = types.FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _names(code: types.CodeType) -> set[str]:
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return {*code.co_names, *code.co_freevars}.union(*(_names(c) for c in inner))


def _refusal(seam: Seam, what: str) -> str:
    return (
        f"{seam.module.partition('.')[0]} seam {seam.module}.{seam.name} {what}. This RoutePack "
        f"knows slime {KNOWN} with its Megatron: install that version, or run with "
        "--routepack-policy off"
    )
