"""The capture bench in a process of its own: stream, time, compare with bincount, measure memory.

Run by `app.bench.capture`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np
from numba import njit

from app.bench.fresh import peak_mb
from rollout_hooks.counts import count
from rollout_hooks.routed_experts import CaptureSpec, compact, decode, encode

NUM_HELD = 4
NUM_ROUNDS = 7
SKEW = 0.5
NUM_PROMPT_TOKENS = 512


def measure(arguments: dict) -> dict:
    """Return the figures and what was seen beside them."""
    num_tokens, num_layers = arguments["num_tokens"], arguments["num_layers"]
    num_experts, top_k = arguments["num_experts"], arguments["top_k"]
    num_trajectories = arguments["num_trajectories"]
    spec = CaptureSpec(
        num_hidden_layers=num_layers,
        moe_layers=tuple(range(num_layers)),
        num_experts=num_experts,
        top_k=top_k,
    )
    small = encode(skewed_routing(3, num_layers, num_experts, top_k, seed=0))
    _decode_count(small, 1, 3, spec)  # compile, before memory is looked at
    start_mb = _reset_peak()
    held = [
        encode(skewed_routing(num_tokens - 1, num_layers, num_experts, top_k, seed))
        for seed in range(NUM_HELD)
    ]
    _reset_peak()  # drawing routing is not part of the stream
    demand = np.empty((num_trajectories, num_layers, num_experts), np.int32)
    seconds = np.zeros(2)
    for i in range(num_trajectories):
        demand[i], spent = _decode_count(
            held[i % NUM_HELD], NUM_PROMPT_TOKENS, num_tokens - NUM_PROMPT_TOKENS, spec
        )
        seconds += spent
    added_mb = peak_mb() - start_mb
    _check(demand, num_tokens - 1, top_k)
    num_ids = num_trajectories * (num_tokens - 1) * num_layers * top_k
    rounds = [
        _against_bincount(held[i % NUM_HELD], num_tokens, spec, demand[i % NUM_HELD])
        for i in range(NUM_ROUNDS)
    ]
    return {
        "figures": {
            "count_ids_per_s_core": num_ids / seconds[1],
            "decode_count_ids_per_s_core": num_ids / seconds.sum(),
            "speedup_vs_bincount": median(min(other) / ours for ours, other in rounds),
            "peak_mb": added_mb,
        },
        "num_held": NUM_HELD,
        "encoded_mb": len(held[0]) / 2**20,
        "compact_mb": (num_tokens - 1) * num_layers * top_k / 2**20,
        "demand_mb": demand.nbytes / 2**20,
        "stream_cpu_seconds": float(seconds.sum()),
        "bincount_rounds": rounds,
    }


def _decode_count(
    encoded: str, num_prompt: int, num_new: int, spec: CaptureSpec
) -> tuple[np.ndarray, tuple[float, float]]:
    """Return (demand, CPU seconds of decode and compact, CPU seconds of count)."""
    start = time.thread_time()
    routed = compact(decode(encoded, num_prompt, num_new, spec, "bench"), spec, "bench")
    decoded = time.thread_time()
    counts = count(routed, spec.num_experts)
    return counts, (decoded - start, time.thread_time() - decoded)


def _against_bincount(
    encoded: str, num_tokens: int, spec: CaptureSpec, expected: np.ndarray
) -> tuple[float, list[float]]:
    """CPU seconds of (count, [one bincount per layer, one over (layer, expert) pairs])."""
    routed = compact(decode(encoded, 1, num_tokens - 1, spec, "bench"), spec, "bench")
    ways = [
        lambda: count(routed, spec.num_experts),
        lambda: _bincount_per_layer(routed, spec.num_experts),
        lambda: _bincount_of_pairs(routed, spec.num_experts),
    ]
    seconds = []
    for way in ways:
        start = time.thread_time()
        counts = way()
        seconds.append(time.thread_time() - start)
        if not np.array_equal(counts, expected):
            raise RuntimeError("bench capture: count and numpy.bincount differ")
    return seconds[0], seconds[1:]


def _bincount_per_layer(routed: np.ndarray, num_experts: int) -> np.ndarray:
    return np.stack(
        [np.bincount(routed[:, n].ravel(), minlength=num_experts) for n in range(routed.shape[1])]
    )


def _bincount_of_pairs(routed: np.ndarray, num_experts: int) -> np.ndarray:
    num_layers = routed.shape[1]
    pairs = routed + np.arange(num_layers)[None, :, None] * num_experts
    return np.bincount(pairs.ravel(), minlength=num_layers * num_experts).reshape(num_layers, -1)


def _check(demand: np.ndarray, num_rows: int, top_k: int) -> None:
    if not (demand.sum(axis=2) == num_rows * top_k).all():
        raise RuntimeError("bench capture: a layer's counts do not sum to rows x top_k")


def skewed_routing(
    num_rows: int, num_layers: int, num_experts: int, top_k: int, seed: int
) -> np.ndarray:
    """Routing int32 `[row, layer, top_k]` with distinct ids, popularity of experts by Dirichlet."""
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.full(num_experts, SKEW), size=num_layers) + 1e-4
    cumulative = np.cumsum(shares / shares.sum(1, keepdims=True), axis=1)
    routed = np.empty((num_rows, num_layers, top_k), np.int32)
    _draw(cumulative, seed, routed)
    return routed


@njit(cache=True)
def _draw(cumulative, seed, routed):  # type: ignore[no-untyped-def]
    """Draw each token's ids one by one, again where an id is there already."""
    np.random.seed(seed)
    num_rows, num_layers, top_k = routed.shape
    last = cumulative.shape[1] - 1
    for row in range(num_rows):
        for layer in range(num_layers):
            k = 0
            while k < top_k:
                expert = min(np.searchsorted(cumulative[layer], np.random.random()), last)
                if not (routed[row, layer, :k] == expert).any():
                    routed[row, layer, k] = expert
                    k += 1


def _reset_peak() -> float:
    """Forget the peak so far; return the resident memory that is left, MB."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_mb()


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
