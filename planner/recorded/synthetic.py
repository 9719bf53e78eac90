"""Synthetic windows shaped after the paper's published statistics (Section 2.3.2, Table 3).

`synthetic:tiny` and `synthetic:flash` are frozen: the 20 consecutive windows of seed 0, held by
checksums in the tests, so that figures stay comparable. A generator that fits better gets a new
name and stands beside them.

Length: t = prompt(group) + min(max_response, exp(mean + std z)), z standardised from category,
group and trajectory terms. Routing: logit(i, l, e) = base + category + drift + group + trajectory
+ length x loading, where every term has an expert part and a part shared by the experts of one
identity EP rank; softmax, each share cut at 1 / top_k, then cumulative rounding to top_k x t.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from planner.window import Window

_F32 = np.float32
_MARGIN = 1e-4  # shares are cut this far below 1 / top_k, so that rounding stays inside the rows
_DRIFT = 0.9  # AR(1) coefficient of the category drift from window to window
_CAP_PASSES = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Parameters of one synthetic corpus; pairs are (expert part, identity-rank part)."""

    num_layers: int
    num_experts: int
    category_mix: tuple[float, ...]
    """Share of prompts of each task category."""
    category_length: tuple[float, ...]
    """Shift of the log length of each category."""
    base_shape: float
    """Shape of the Gamma that the base popularity is drawn from."""
    base_rank_std: float
    uniform_ranks: bool = False
    """Identity-rank popularity is uniform instead of normal."""
    category_std: tuple[float, float]
    drift_std: tuple[float, float] = (0.1, 0.05)
    group_std: tuple[float, float]
    trajectory_std: tuple[float, float]
    length_loading: float
    length_group_std: float
    length_trajectory_std: float
    prompt_log: tuple[float, float]
    """Mean and standard deviation of the log prompt length."""
    response_log: tuple[float, float]
    max_response: int = 7168
    num_ranks: int = 8
    """Identity EP ranks that share a part of every term."""
    top_k: int = 8
    num_groups: int = 64
    group_size: int = 8


TINY = Corpus(
    num_layers=23,
    num_experts=128,
    category_mix=(0.587, 0.152, 0.221, 0.041),
    category_length=(0.4, -0.1, -0.4, -0.6),
    base_shape=2.2,
    base_rank_std=0.21,
    category_std=(0.55, 0.27),
    group_std=(0.3, 0.3),
    trajectory_std=(0.42, 0.3),
    length_loading=0.15,
    length_group_std=0.5,
    length_trajectory_std=0.8,
    prompt_log=(4.88, 1.05),
    response_log=(9.62, 0.85),
)

FLASH = Corpus(
    num_layers=40,
    num_experts=512,
    category_mix=(0.564, 0.155, 0.236, 0.045),
    category_length=(0.1, -0.02, -0.1, -0.15),
    base_shape=1.9,
    base_rank_std=0.17,
    uniform_ranks=True,
    category_std=(0.55, 0.17),
    group_std=(0.5, 0.16),
    trajectory_std=(0.3, 0.15),
    length_loading=0.2,
    length_group_std=0.1,
    length_trajectory_std=0.99,
    prompt_log=(4.9, 0.95),
    response_log=(8.02, 0.6),
)


def synthetic_windows(
    corpus: Corpus,
    num_windows: int = 20,
    seed: int = 0,
    layer_numbers: tuple[int, ...] | None = None,
) -> Iterator[Window]:
    """Yield consecutive windows, one at a time; the drift chains them, so none can be skipped.

    Every position is routed: routed_rows equals length. Demand is uint16, or int32 where lengths
    reach 65536 tokens. Raises ValueError when the experts do not split over the identity ranks.
    """
    layers, experts, ranks = corpus.num_layers, corpus.num_experts, corpus.num_ranks
    if experts % ranks:
        raise ValueError(f"Corpus.num_experts: {experts} is not a multiple of num_ranks {ranks}")
    rng = np.random.default_rng(seed)
    of_rank = experts // ranks
    mix = np.array(corpus.category_mix)

    def term(std: tuple[float, float], *lead: int) -> NDArray[np.float32]:
        by_expert = std[0] * rng.standard_normal((*lead, layers, experts), dtype=_F32)
        by_rank = std[1] * rng.standard_normal((*lead, layers, ranks), dtype=_F32)
        return (by_expert + np.repeat(by_rank, of_rank, -1)).astype(_F32)

    shape = corpus.base_shape
    base = np.log(rng.gamma(shape, size=(layers, experts)) / shape).astype(_F32)
    if corpus.uniform_ranks:
        rank_base = rng.uniform(-(3**0.5), 3**0.5, (layers, ranks))
    else:
        rank_base = rng.standard_normal((layers, ranks))
    base = base + np.repeat(corpus.base_rank_std * rank_base, of_rank, -1).astype(_F32)
    category = term(corpus.category_std, len(mix))
    drift = term(corpus.drift_std, len(mix))
    loading = term((corpus.length_loading, corpus.length_loading * 0.4))
    num = corpus.num_groups * corpus.group_size
    group = np.repeat(np.arange(corpus.num_groups), corpus.group_size)
    for window_id in range(num_windows):
        if window_id:
            fresh = term(corpus.drift_std, len(mix))
            drift = _DRIFT * drift + math.sqrt(1 - _DRIFT * _DRIFT) * fresh
        task = rng.choice(len(mix), corpus.num_groups, p=mix / sum(corpus.category_mix))
        length, length_z = _lengths(rng, corpus, task)
        of_group = base + category[task] + drift[task] + term(corpus.group_std, corpus.num_groups)
        by_expert = rng.standard_normal((num, layers, experts), dtype=_F32)
        by_rank = rng.standard_normal((num, layers, ranks), dtype=_F32)
        wide = int(length.max()) > np.iinfo(np.uint16).max
        demand = np.empty((num, layers, experts), np.int32 if wide else np.uint16)
        _fill_demand(
            of_group,
            loading,
            group,
            length_z,
            by_expert,
            corpus.trajectory_std[0],
            corpus.trajectory_std[1],
            by_rank,
            length,
            corpus.top_k,
            demand,
        )
        yield Window(
            window_id=window_id,
            length=length,
            routed_rows=length,
            demand=demand,
            top_k=corpus.top_k,
            group=group,
            layer_numbers=layer_numbers,  # type: ignore[arg-type]
        )


def _lengths(
    rng: np.random.Generator, corpus: Corpus, task: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Tokens int64 `[trajectory]` and the standardised log length float32 `[trajectory]`."""
    num_groups, size = corpus.num_groups, corpus.group_size
    shift = np.array(corpus.category_length)
    z = shift[task] + corpus.length_group_std * rng.standard_normal(num_groups)
    z = np.repeat(z, size)
    z = z + corpus.length_trajectory_std * rng.standard_normal(num_groups * size)
    mean = np.dot(corpus.category_mix, corpus.category_length)
    variance = (
        np.dot(corpus.category_mix, (shift - mean) ** 2)
        + corpus.length_group_std**2
        + corpus.length_trajectory_std**2
    )
    length_z = ((z - mean) / math.sqrt(variance)).astype(_F32)
    log_mean, log_std = corpus.prompt_log
    prompt = np.clip(np.exp(log_mean + log_std * rng.standard_normal(num_groups)), 20, 1024)
    log_mean, log_std = corpus.response_log
    response = np.maximum(64, np.exp(log_mean + log_std * length_z))
    response = np.minimum(corpus.max_response, response)
    return np.round(np.repeat(prompt, size) + response).astype(np.int64), length_z


@njit(cache=True, nogil=True)
def _fill_demand(  # type: ignore[no-untyped-def]
    of_group, loading, group, length_z, by_expert, expert_std, rank_std, by_rank, length, top_k, out
):
    """Softmax, cut at 1 / top_k, cumulative rounding; out `[trajectory, layer, expert]`.

    The group and length terms are added in double precision and rounded to single once, as a fused
    multiply-add would: the frozen checksums then hold on every processor.
    """
    num, layers, experts = out.shape
    of_rank = experts // by_rank.shape[2]
    cap = 1.0 / top_k - _MARGIN
    share = np.empty(experts)
    for i in range(num):
        for layer in range(layers):
            total = 0.0
            for e in range(experts):
                logit = np.float64(of_group[group[i], layer, e]) + np.float64(
                    length_z[i]
                ) * np.float64(loading[layer, e])
                logit = np.float64(np.float32(logit))
                logit += expert_std * by_expert[i, layer, e]
                logit += rank_std * by_rank[i, layer, e // of_rank]
                share[e] = math.exp(logit)
                total += share[e]
            for e in range(experts):
                share[e] /= total
            for _ in range(_CAP_PASSES):
                over = 0.0
                free = 0.0
                for e in range(experts):
                    if share[e] >= cap:
                        over += share[e] - cap
                        share[e] = cap
                    else:
                        free += share[e]
                if over <= 0:
                    break
                for e in range(experts):
                    if share[e] < cap:
                        share[e] *= 1 + over / free
            tokens = length[i] * top_k
            cumulated = 0.0
            before = 0
            for e in range(experts):
                cumulated += share[e]
                upto = int(cumulated * tokens + 0.5)
                if e == experts - 1:
                    upto = tokens
                out[i, layer, e] = upto - before
                before = upto


def _fill_demand_numpy(
    of_group: NDArray[np.float32],
    loading: NDArray[np.float32],
    group: NDArray[np.int64],
    length_z: NDArray[np.float32],
    by_expert: NDArray[np.float32],
    expert_std: float,
    rank_std: float,
    by_rank: NDArray[np.float32],
    length: NDArray[np.int64],
    top_k: int,
    out: NDArray[np.integer],
) -> None:
    """Plain twin of `_fill_demand`, one trajectory at a time."""
    f64 = np.float64
    of_rank = out.shape[2] // by_rank.shape[2]
    cap = 1.0 / top_k - _MARGIN
    for i in range(len(out)):
        logit = of_group[group[i]].astype(f64) + f64(length_z[i]) * loading.astype(f64)
        logit = logit.astype(_F32).astype(f64) + expert_std * by_expert[i].astype(f64)
        logit = logit + rank_std * np.repeat(by_rank[i].astype(f64), of_rank, -1)
        share = np.exp(logit)
        share /= np.cumsum(share, 1)[:, -1:]
        for layer in share:
            for _ in range(_CAP_PASSES):
                at_cap = layer >= cap
                over = np.cumsum(np.where(at_cap, layer - cap, 0.0))[-1]
                free = np.cumsum(np.where(at_cap, 0.0, layer))[-1]
                layer[at_cap] = cap
                if over <= 0 or at_cap.all():
                    break
                layer[~at_cap] *= 1 + over / free
        upto = np.floor(np.cumsum(share, 1) * (length[i] * top_k) + 0.5).astype(np.int64)
        upto[:, -1] = length[i] * top_k
        out[i] = np.diff(upto, axis=1, prepend=0)
