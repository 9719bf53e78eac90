"""Colocated weight sync caches which rank holds each name; a move rewrites that cache.

`UpdateWeightFromTensor` (slime/backends/megatron_utils/update_weight/update_weight_from_tensor.py)
keeps the parameter infos of the whole model, made once under identity, and the transfer plan of
`configure_expert_routing`. The info of logical expert e must name the rank that now holds e. Every
rank computes this from the placement of all layers, without a collective.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from planner.placement import Placement

_EXPERT = re.compile(r"(.*\bdecoder\.layers\.(\d+)\.mlp\.experts\..*\.\D+)(\d+)")


def relocated_infos(
    buckets: Sequence[Sequence[Any]], placement: Placement, layer_numbers: tuple[int, ...]
) -> list[list[Any]]:
    """The same buckets with every expert's source rank under `placement`.

    buckets: infos (`name`, `src_rank`) as made under identity, where expert e sits in slot e.
    placement: of all MoE layers of the model, in the order of `layer_numbers`.
    """
    slot_of = dict(zip(layer_numbers, placement.slot_of_expert.tolist(), strict=True))
    source = {info.name: info.src_rank for bucket in buckets for info in bucket}

    def moved(info: Any) -> Any:
        match = _EXPERT.fullmatch(info.name)
        if match is None or int(match[2]) not in slot_of:
            return info
        slot = slot_of[int(match[2])][int(match[3])]
        return dataclasses.replace(info, src_rank=source[f"{match[1]}{slot}"])

    return [[moved(info) for info in bucket] for bucket in buckets]


class ColocatedBuckets:
    """Keeps one UpdateWeightFromTensor right over moves."""

    def __init__(self, updater: Any, configure_expert_routing: Callable[..., tuple[Any, Any]]):
        """updater: as constructed, under identity layout and logical names equal to slot names."""
        self.updater = updater
        self.configure = configure_expert_routing
        self.identity = [list(bucket) for bucket in updater._full_param_info_buckets]
        self._engines: dict[str, Any] | None = None
        self._stale: tuple[Placement, tuple[int, ...]] | None = None
        connect = updater.connect_rollout_engines

        def remembering(rollout_engines: Any, rollout_engine_lock: Any, **engines: Any) -> None:
            self._engines = engines
            connect(rollout_engines, rollout_engine_lock, **engines)

        updater.connect_rollout_engines = remembering
        send = updater.update_weights

        def refreshing() -> None:
            self.refresh()
            send()

        updater.update_weights = refreshing

    def follow(self, placement: Placement, layer_numbers: tuple[int, ...]) -> None:
        """Remember where experts are; `refresh` brings the cache up to date."""
        self._stale = placement, layer_numbers

    def refresh(self) -> None:
        """Rewrite sources, and the expert transfer plan if engines are connected, if stale.

        Runs as weights are sent, when process groups are back after a sleep; between two of them
        experts may move any number of times.
        """
        if self._stale is None:
            return
        (placement, layer_numbers), self._stale = self._stale, None
        buckets = relocated_infos(self.identity, placement, layer_numbers)
        updater = self.updater
        updater._hf_weight_iterator.megatron_local_param_info_buckets = buckets
        updater._full_param_info_buckets = tuple(tuple(bucket) for bucket in buckets)
        if self._engines is None:
            return
        num = len(updater.rollout_engines)
        counts = (
            self._engines.get("engine_gpu_counts")
            or [updater.args.rollout_num_gpus_per_engine] * num
        )
        offsets = self._engines.get("engine_gpu_offsets") or _running_sum(counts)
        configs = self._engines.get("engine_parallel_configs")
        plan = self.configure(
            args=updater.args,
            full_param_info_buckets=updater._full_param_info_buckets,
            get_local_weight_names=updater.weights_getter,
            engine_gpu_counts=counts[:num],
            engine_gpu_offsets=offsets[:num],
            engine_parallel_configs=None if configs is None else configs[:num],
            use_distribute=updater.use_distribute,
        )
        updater._non_expert_param_info_buckets, updater._expert_transfer_plan = plan


def _running_sum(counts: Sequence[int]) -> list[int]:
    return [sum(counts[:i]) for i in range(len(counts))]
