"""Capture inside slime: demand counted as each rollout completes, routing kept once and narrow.

`capture` is a `--rollout-sample-hook-path` function (slime/rollout/sample_hooks.py); slime runs it
after the user's own hooks, in the RolloutManager, before the reward. It replaces a sample's int32
`rollout_routed_experts` `[tokens - 1, num_layers, top_k]` by uint8 (E <= 256) or int16, and leaves
the demand `[L, E]` on the sample as `routepack_counts`. The train side widens it again
(`train_hooks.slime_replay`), because slime pads routes in their own type.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rollout_hooks.counts import count
from rollout_hooks.routed_experts import CaptureError, CaptureSpec, compact

logger = logging.getLogger(__name__)

COUNTS = "routepack_counts"

MISSING_HELP = (
    "add --use-rollout-routing-replay (it starts the engines with --enable-return-routed-experts), "
    "and use slime's own build of sglang_router: the one from PyPI drops return_routed_experts; or "
    "set `capture.missing: estimate` in --routepack-config"
)


def capture_spec(args: Any) -> CaptureSpec:
    """The shape of a capture, from slime's arguments."""
    freq = getattr(args, "moe_layer_freq", 1)
    return CaptureSpec.from_moe_layer_freq(
        freq if isinstance(freq, int) else list(freq)[: args.num_layers],
        num_hidden_layers=args.num_layers,
        num_experts=args.num_experts,
        top_k=args.moe_router_topk,
    )


def narrow_type(num_experts: int) -> np.dtype:
    """Smallest integer type that torch and numpy share and that holds the ids."""
    if num_experts <= 256:
        return np.dtype(np.uint8)
    return np.dtype(np.int16 if num_experts <= 2**15 else np.int32)


def reduce_capture(
    routed: Any, num_tokens: int, spec: CaptureSpec, name: str
) -> tuple[np.ndarray, NDArray[np.int32]]:
    """Narrow routing `[tokens - 1, num_hidden_layers, top_k]` and its demand int32 `[L, E]`.

    routed: a torch tensor, an array or nested lists of any integer type.
    Raises CaptureError naming the sample for a wrong shape, an id outside [0, E) or a repeated id.
    """
    array = routed.numpy() if hasattr(routed, "numpy") else np.asarray(routed)
    kept = compact(array, spec, name)
    if len(kept) != max(0, num_tokens - 1):
        raise CaptureError(
            f"sample {name}: {len(kept)} routed rows for {num_tokens} tokens, expected "
            f"{num_tokens - 1}; a partial rollout must keep the rows of its earlier part"
        )
    demand = count(kept, spec.num_experts)
    narrow = narrow_type(spec.num_experts)
    if spec.num_moe_layers == spec.num_hidden_layers:
        return kept.astype(narrow, copy=False), demand
    out = np.zeros((len(kept), spec.num_hidden_layers, spec.top_k), narrow)
    out[:, list(spec.moe_layers)] = kept
    return out, demand


def capture(args: Any, sample: Any, **_: Any) -> None:
    """Reduce one completed sample in place; a sample without capture stays as it is.

    An aborted sample stays too: a partial rollout goes on with it, and its engine may return the
    routing of all its rows again. Raises CaptureError for an impossible capture: slime would replay
    it in training.
    """
    if getattr(getattr(sample, "status", None), "value", None) != "aborted":
        _reduce(args, sample)


def _reduce(args: Any, sample: Any) -> None:
    """Reduce a sample whatever its status, unless the demand that it carries is that of its rows.

    Demand of an earlier, shorter part of a partial rollout is counted anew.
    """
    routed = getattr(sample, "rollout_routed_experts", None)
    if routed is None:
        return
    counted, num_rows = getattr(sample, COUNTS, None), len(sample.tokens) - 1
    num_counted = None if counted is None else int(counted[0].sum()) // args.moe_router_topk
    if num_counted == num_rows == len(routed):
        return
    name = f"{sample.index} (group {sample.group_index})"
    sample.rollout_routed_experts, demand = reduce_capture(
        routed, len(sample.tokens), capture_spec(args), name
    )
    setattr(sample, COUNTS, demand)


def demand_of_samples(
    args: Any, samples: Sequence[Any], missing: Literal["error", "estimate"]
) -> tuple[list[NDArray[np.int32] | None], list[int]]:
    """Demand of every sample (None where unknown) and its GRPO group, at sealing.

    Samples that no hook has seen (a loaded dump, a custom rollout function) are reduced here.
    Raises CaptureError naming the sample when a capture is missing under `error`, or impossible
    while slime replays it; without replay an impossible capture counts as missing.
    """
    demands: list[NDArray[np.int32] | None] = []
    replayed = getattr(args, "use_rollout_routing_replay", False)
    for sample in samples:
        try:
            _reduce(args, sample)
        except CaptureError:
            if replayed or missing == "error":
                raise
            logger.warning("capture refused, demand estimated", exc_info=True)
            sample.rollout_routed_experts = None
            setattr(sample, COUNTS, None)
        demands.append(getattr(sample, COUNTS, None))
        if demands[-1] is None and missing == "error":
            raise CaptureError(
                f"sample {sample.index} (group {sample.group_index}): no routed experts; "
                f"{MISSING_HELP}"
            )
    groups = [-1 if sample.group_index is None else int(sample.group_index) for sample in samples]
    return demands, [i if group < 0 else group for i, group in enumerate(groups)]


def weight_versions(samples: Sequence[Any]) -> tuple[int, int]:
    """(stale, mixed) trajectories of a rollout, by the weight version of every engine response.

    Stale: begun before the newest version of its rollout. Mixed: more than one version in one
    trajectory, as partial rollouts have. Samples without versions count as neither.
    """
    seen = [
        [_version_number(v) for v in getattr(sample, "weight_versions", None) or []]
        for sample in samples
    ]
    newest = max((max(versions) for versions in seen if versions), default=0)
    stale = sum(bool(versions) and min(versions) < newest for versions in seen)
    return stale, sum(len(set(versions)) > 1 for versions in seen)


def _version_number(version: Any) -> int:
    """slime counts versions from 1; an engine that was never updated says `default`."""
    return int(version) if str(version).isdigit() else 0
