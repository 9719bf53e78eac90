"""slime's `--save-debug-rollout-data` dumps: one torch file a rollout, one dictionary a sample.

A file holds `rollout_id` and `samples`; a sample has `tokens`, `group_index` and
`rollout_routed_experts` `[tokens - 1, layer, top_k]` in any integer type, or None.
Peer: slime `slime/observability/rollout_data_utils.py` and `slime/utils/types.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.recorded.estimate import demand_shares, estimate_counts
from planner.recorded.routing import routing_counts, smallest_demand
from planner.recorded.torch_file import as_array
from planner.window import Window


def slime_windows(
    content: dict[str, Any],
    path: Path,
    *,
    num_experts: int | None,
    moe_layers: Sequence[int] | None = None,
    top_k: int | None = None,
    missing: str = "error",
    num_steps: int = 1,
    previous_shares: NDArray[np.floating] | None = None,
) -> list[Window]:
    """The windows of one rollout: `num_steps` equal parts of its samples in arrival order.

    num_experts: E; a dump does not say it.
    moe_layers: global layer numbers that are MoE; None takes every recorded layer.
    top_k: needed only when no sample has a capture.
    missing: `error`, or `estimate` from previous_shares `[layer, expert]` (without them, from the
        captured samples of the same rollout, else uniform).
    Window ids are rollout_id x num_steps + step.
    Raises ValueError naming file and sample for a capture that is missing under `error` or not
    [tokens - 1, layer, top_k] of valid ids.
    """
    if num_experts is None:
        raise ValueError(f"{path}: a slime dump does not say num_experts; pass num_experts")
    if missing not in ("error", "estimate"):
        raise ValueError(f"missing: expected 'error' or 'estimate', got {missing!r}")
    samples = content.get("samples")
    if not isinstance(samples, list) or not all(isinstance(s, dict) for s in samples):
        raise ValueError(f"{path}: not a slime dump, `samples` is not a list of dictionaries")
    if num_steps < 1 or len(samples) < num_steps or len(samples) % num_steps:
        raise ValueError(
            f"{path}: {len(samples)} samples do not split into num_steps={num_steps} equal steps; "
            "give slime's --num-steps-per-rollout"
        )
    lengths = np.array([_num_tokens(s, path, i) for i, s in enumerate(samples)], np.int64)
    captures = [_capture(s, path, i, int(lengths[i])) for i, s in enumerate(samples)]
    if missing == "error" and any(capture is None for capture in captures):
        first = next(i for i, capture in enumerate(captures) if capture is None)
        raise ValueError(
            f"{path}: sample {first} has no rollout_routed_experts "
            f"({sum(c is None for c in captures)} of {len(samples)} lack them); record with "
            "--use-rollout-routing-replay, or choose missing: estimate"
        )
    layers, found_top_k = _model(captures, path, moe_layers, top_k)
    rows = np.maximum(lengths - 1, 0)
    demand = np.zeros((len(samples), len(layers), num_experts), np.int64)
    for i, capture in enumerate(captures):
        if capture is not None and capture.size:
            demand[i] = routing_counts(capture, num_experts, layers, f"{path}: sample {i}")
    shares = demand_shares(demand) if previous_shares is None else previous_shares
    for i, capture in enumerate(captures):
        if capture is None:
            demand[i] = estimate_counts(shares, int(rows[i]), found_top_k)
    estimated = np.array([capture is None for capture in captures])
    group = np.array([_group(s, path, i) for i, s in enumerate(samples)], np.int64)
    first_id = _rollout_id(content, path) * num_steps
    size = len(samples) // num_steps
    return [
        Window(
            window_id=first_id + step,
            length=lengths[part],
            routed_rows=rows[part],
            demand=smallest_demand(demand[part]),
            top_k=found_top_k,
            group=group[part],
            estimated=estimated[part],
            layer_numbers=layers,
        )
        for step, part in enumerate(
            slice(step * size, (step + 1) * size) for step in range(num_steps)
        )
    ]


def _model(
    captures: Sequence[NDArray[np.integer] | None],
    path: Path,
    moe_layers: Sequence[int] | None,
    top_k: int | None,
) -> tuple[tuple[int, ...], int]:
    """(MoE layers, top_k) that the captures agree on, or that the caller gave."""
    shapes = {
        capture.shape[1:]: i
        for i, capture in reversed(list(enumerate(captures)))
        if capture is not None and capture.size
    }
    if not shapes:
        if moe_layers is None or top_k is None:
            raise ValueError(f"{path}: no sample has routed experts; pass moe_layers and top_k")
        return tuple(moe_layers), top_k
    if len(shapes) > 1 or len(next(iter(shapes))) != 2:
        raise ValueError(
            f"{path}: samples {sorted(shapes.values())} have routing of shapes "
            f"{[('rows', *shape) for shape in shapes]}, expected one [rows, layers, top_k]"
        )
    num_layers, found = next(iter(shapes))
    if top_k is not None and top_k != found:
        raise ValueError(f"{path}: routing is top-{found}, top_k says {top_k}")
    return tuple(range(num_layers) if moe_layers is None else moe_layers), found


def _num_tokens(sample: dict[str, Any], path: Path, i: int) -> int:
    tokens = sample.get("tokens")
    try:
        num = len(tokens)  # type: ignore[arg-type]
    except TypeError:
        num = 0
    if num < 1:
        raise ValueError(f"{path}: sample {i} has no tokens")
    return num


def _capture(
    sample: dict[str, Any], path: Path, i: int, num_tokens: int
) -> NDArray[np.integer] | None:
    """Routing `[tokens - 1, layer, top_k]` of one sample, or None."""
    value = sample.get("rollout_routed_experts")
    if value is None:
        return None
    array = as_array(value, f"{path}: sample {i}: rollout_routed_experts")
    if len(array) != num_tokens - 1:
        raise ValueError(
            f"{path}: sample {i} has {len(array)} routed rows for {num_tokens} tokens, expected "
            f"{num_tokens - 1}"
        )
    return array


def _group(sample: dict[str, Any], path: Path, i: int) -> int:
    value = sample.get("group_index")
    if value is None:
        return i
    if not isinstance(value, int):
        raise ValueError(f"{path}: sample {i}: group_index is {value!r}, expected an integer")
    return value


def _rollout_id(content: dict[str, Any], path: Path) -> int:
    value = content.get("rollout_id", 0)
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    if not isinstance(value, int):
        raise ValueError(f"{path}: rollout_id is {value!r}, expected an integer")
    return value
