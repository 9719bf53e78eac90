"""slime's RolloutManager, which seals a rollout instead of splitting it over the DP ranks."""

from __future__ import annotations

import time
from typing import Any

from app.slime.config import SlimeConfig
from app.slime.messages import Sealed
from rollout_hooks.routed_experts import CaptureError
from rollout_hooks.slime_capture import capture_spec, demand_of_samples, weight_versions
from rollout_hooks.slime_probe import check_capture
from rollout_hooks.slime_windows import SealedRollout


def manager_class(base: type, config: SlimeConfig) -> type:
    """A subclass of `base` (slime/ray/rollout.py, `RolloutManager`) for `ray.remote`.

    `generate` stays slime's. Its last two steps are overridden: the conversion also takes the
    demand of the samples, and the split becomes sealing, since rows are not known yet. Ray pickles
    this class by value, so nothing is patched in slime's module.
    """

    class RoutePackRolloutManager(base):  # type: ignore[misc, valid-type]
        def __init__(self, args, pg):
            super().__init__(args, pg)
            if not args.debug_train_only and args.use_rollout_routing_replay:
                url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
                check_capture(url, capture_spec(args), config.capture.missing)

        def set_train_parallel_config(self, config):
            """A critic reports sizes too, after the actor, but not the actor's topology."""
            known = getattr(self, "train_parallel_config", None) or {}
            if "routepack" in known:
                config = {"routepack": known["routepack"], **config}
            super().set_train_parallel_config(config)

        def _convert_samples_to_train_data(self, samples):
            started = time.time()
            demand, groups = demand_of_samples(self.args, samples, config.capture.missing)
            data = super()._convert_samples_to_train_data(samples)
            if len(data["tokens"]) != len(samples):
                raise CaptureError(
                    f"--custom-convert-samples-to-train-data-path returned {len(data['tokens'])} "
                    f"samples for {len(samples)}: RoutePack plans what it saw; filter samples in "
                    "--rollout-function-path or --dynamic-sampling-filter-path instead"
                )
            versions = weight_versions(samples)
            self._routepack_demand = demand, groups, versions, time.time() - started
            return data

        def _split_train_data_by_dp(self, data):
            import ray

            demand, groups, (num_stale, num_mixed), aux_seconds = self._routepack_demand
            del self._routepack_demand
            sealed_at = time.time()
            routing = data.pop("rollout_routed_experts", None)
            rollout = SealedRollout(
                rollout_id=self.rollout_id,
                lengths=[len(tokens) for tokens in data["tokens"]],
                demands=demand,
                rollout_ids=list(data["rollout_ids"]),
                groups=groups,
                spec=capture_spec(self.args),
                global_batch_size=self.args.global_batch_size,
                parallel=self.train_parallel_config,
                sealed_at=sealed_at,
                aux_seconds=aux_seconds,
                num_stale=num_stale,
                num_mixed=num_mixed,
            )
            return Sealed(
                rollout=rollout,
                data=ray.put(data),
                routing=None if routing is None else [ray.put(as_array(r)) for r in routing],
            )

    return RoutePackRolloutManager


def as_array(routed: Any):
    """A numpy array for the object store, which readers map without a copy."""
    return routed.numpy() if hasattr(routed, "numpy") else routed
