"""Megatron's routing traces: a directory of `router_trace_rank{N}.jsonl`, ranks merged.

`--moe-routing-trace-path` of newer releases writes one JSON object a line: step, layer, rank,
num_tokens, topk, top_indices `[token, topk]`, and block (`decoder` or `mtp`). The step is the
training iteration. A trace knows micro-batches, not trajectories: the k-th micro-batch of one DP
slot is the unit that the window calls a trajectory, which is right for placement and row loads and
says nothing about how its trajectories could be packed otherwise.
Peer: Megatron-LM `megatron/core/transformer/moe/router_trace.py` (0.19).

- `layer` counts within a pipeline stage, so `pp` is needed to tell stages apart. Ranks are
  stage-major (Megatron's default order), and consecutive ranks of a stage share a DP slot. Global
  layer numbers are known only at pp 1; else they are ordinals of the MoE layers.
- Full activation recompute records every micro-batch twice: a rank, step and layer whose records
  all come in identical pairs is halved.
- MTP layers are left out. Traces under VPP repeat local numbers and are not supported.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from planner.recorded.routing import routing_counts, smallest_demand
from planner.window import Window

_NAME = re.compile(r"router_trace_rank(\d+)\.jsonl$")
_Routing = NDArray[np.int32]


def is_megatron_trace(directory: Path) -> bool:
    """Whether the directory holds at least one rank's trace."""
    return any(_NAME.match(entry.name) for entry in directory.iterdir())


def megatron_windows(
    directory: Path, *, num_experts: int | None, pp: int = 1, ranks_per_slot: int = 1
) -> list[Window]:
    """One window for each step that every rank recorded, in step order.

    num_experts: E; a trace does not say it.
    pp: pipeline stages; must divide the number of ranks.
    ranks_per_slot: TP x CP, consecutive ranks of a stage whose token shards form one micro-batch.
    Raises ValueError naming file and line for a damaged record, or the step where ranks disagree
    in micro-batches, tokens or layers.
    """
    if num_experts is None:
        raise ValueError(f"{directory}: a routing trace does not say num_experts; pass num_experts")
    paths = {int(m[1]): p for p in directory.iterdir() if (m := _NAME.match(p.name))}
    ranks = sorted(paths)
    if pp < 1 or ranks_per_slot < 1 or len(ranks) % (pp * ranks_per_slot):
        raise ValueError(
            f"{directory}: {len(ranks)} ranks do not split into pp={pp} stages of slots of "
            f"ranks_per_slot={ranks_per_slot} ranks"
        )
    per_stage = len(ranks) // pp
    traces = [_read_rank(paths[rank]) for rank in ranks]
    steps = sorted(set.intersection(*(set(trace) for trace in traces)))
    if not steps:
        raise ValueError(f"{directory}: no step was recorded by all {len(ranks)} ranks")
    windows = []
    for step in steps:
        stages = [
            [traces[stage * per_stage + i][step] for i in range(per_stage)] for stage in range(pp)
        ]
        windows.append(_window(directory, step, stages, num_experts, ranks_per_slot))
    return windows


def _read_rank(path: Path) -> dict[int, dict[int, list[_Routing]]]:
    """Routing `[token, top_k]` of one rank by step, layer and micro-batch."""
    found: dict[int, dict[int, list[_Routing]]] = defaultdict(lambda: defaultdict(list))
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                    if record.get("block", "decoder") != "decoder":
                        continue
                    top_k = int(record["topk"]) if "topk" in record else -1
                    raw = np.asarray(record["top_indices"])
                    if raw.size == 0:
                        raw = raw.astype(np.int32).reshape(0, max(top_k, 0))
                    if raw.ndim != 2 or raw.dtype.kind not in "iu":
                        raise ValueError("top_indices is not [token, topk] of integers")
                    expected = (int(record.get("num_tokens", raw.shape[0])), raw.shape[1])
                    if raw.shape != expected or top_k not in (-1, raw.shape[1]):
                        raise ValueError(f"top_indices is {raw.shape}, not {expected}")
                    step, layer = int(record["step"]), int(record["layer"])
                except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
                    raise ValueError(f"{path}, line {number}: damaged record ({error})") from error
                found[step][layer].append(raw.astype(np.int64))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from error
    for layers in found.values():
        for layer, records in layers.items():
            layers[layer] = _without_recompute(records)
    return found


def _without_recompute(records: list[_Routing]) -> list[_Routing]:
    """First record of each pair, when every record was written exactly twice."""
    keys = [record.tobytes() for record in records]
    if set(Counter(keys).values()) != {2}:
        return records
    return list(dict(zip(keys, records, strict=True)).values())


def _window(
    directory: Path,
    step: int,
    stages: list[list[dict[int, list[_Routing]]]],
    num_experts: int,
    ranks_per_slot: int,
) -> Window:
    """Merge the ranks of one step: token shards of a slot joined, stages stacked as layers."""
    layers = [sorted(stage[0]) for stage in stages]
    sizes: NDArray[np.int64] | None = None
    top_k = 0
    demand: list[NDArray[np.int64]] = []
    for s, stage in enumerate(stages):
        for layer in layers[s]:
            shards = [rank.get(layer, []) for rank in stage]
            if len({len(shard) for shard in shards}) != 1 or any(
                sorted(rank) != layers[s] for rank in stage
            ):
                raise ValueError(
                    f"{directory}: step {step}, stage {s}: ranks differ in layers or micro-batches "
                    f"of layer {layer}; give the pp of the run (VPP is not supported)"
                )
            slots = [
                [np.concatenate(parts) for parts in zip(*shards[i : i + ranks_per_slot])]
                for i in range(0, len(shards), ranks_per_slot)
            ]
            routed = [micro_batch for slot in slots for micro_batch in slot if len(micro_batch)]
            found = np.array([len(micro_batch) for micro_batch in routed], np.int64)
            if sizes is None:
                if not len(found):
                    raise ValueError(f"{directory}: step {step} routed no token")
                sizes, top_k = found, routed[0].shape[1]
            if not np.array_equal(sizes, found) or {r.shape[1] for r in routed} != {top_k}:
                raise ValueError(
                    f"{directory}: step {step}, stage {s}, layer {layer}: micro-batches of "
                    f"{found.tolist()} tokens, other layers have {sizes.tolist()}; give the pp "
                    "and ranks_per_slot of the run"
                )
            name = f"{directory}: step {step}, stage {s}, layer {layer}"
            demand.append(
                np.stack([routing_counts(r[:, None], num_experts, (0,), name)[0] for r in routed])
            )
    assert sizes is not None
    numbers = tuple(layers[0]) if len(stages) == 1 else tuple(range(len(demand)))
    return Window(
        window_id=step,
        length=sizes,
        routed_rows=sizes,
        demand=smallest_demand(np.stack(demand, axis=1)),
        top_k=top_k,
        layer_numbers=numbers,
    )
