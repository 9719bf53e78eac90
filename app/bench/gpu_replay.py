"""Bench of the cost model on real kernels: a plan's rows, rank by rank, on one device.

The ranks of a row run one after the other; the slowest slot's dense side and, in every layer, the
slowest EP rank's copies and experts are what a synchronized job would wait for (Equations 13 to
15). The sums over rows are compared with the model's: ratios of the policies, correlation, error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from app.bench.gpu_replay_rows import RowWork, balanced, rows_of
from app.bench.result import BenchResult
from app.results.progress import track
from planner.cost import CostModel
from planner.placement import Placement
from planner.policies import COMPARED
from planner.policy import PlannerOptions, make_plan
from planner.recorded.flops import ModelShape, cost_from_shape, gqa_params
from planner.recorded.synthetic import TINY, Corpus, synthetic_windows
from planner.rows import Rows
from planner.score import rank_demand, row_costs
from planner.topology import Topology
from planner.window import Window

FORCED = "forced"
"""Rows of off with every expert used equally often."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A model, its job and its windows, sized for a device."""

    shape: ModelShape
    topology: Topology
    corpus: Corpus
    num_windows: int
    num_repeats: int

    @property
    def cost(self) -> CostModel:
        return cost_from_shape(self.shape, self.topology.capacity, tp=1, cp=1)


class Calls(Protocol):
    """What the bench needs of the kernels; seconds of one call."""

    def dense(self, lengths: Sequence[int]) -> float: ...

    def experts(self, tokens: Sequence[int], num_copies: int) -> float: ...


CPU = Setting(
    shape=ModelShape(
        num_layers=4,
        num_dense_layers=1,
        num_experts=16,
        top_k=2,
        hidden=128,
        dense_ffn=256,
        expert_ffn=256,
        vocab=256,
        num_heads=4,
        head_dim=32,
        value_dim=32,
        attention_params=gqa_params(128, 4, 2, 32),
    ),
    topology=Topology.uniform(dp=4, ep=4, capacity=1600),
    corpus=replace(
        TINY,
        num_layers=3,
        num_experts=16,
        num_ranks=4,
        top_k=2,
        num_groups=8,
        group_size=8,
        max_response=900,
        response_log=(5.5, 0.8),
    ),
    num_windows=3,
    num_repeats=3,
)
CUDA = Setting(
    shape=ModelShape(
        num_layers=9,
        num_dense_layers=1,
        num_experts=128,
        top_k=8,
        hidden=2048,
        dense_ffn=6144,
        expert_ffn=768,
        vocab=32768,
        num_heads=32,
        head_dim=128,
        value_dim=128,
        attention_params=gqa_params(2048, 32, 16, 128),
    ),
    topology=Topology.uniform(dp=8, ep=8, capacity=16384),
    corpus=replace(TINY, num_layers=8, num_groups=32),
    num_windows=3,
    num_repeats=3,
)


def bench_gpu_replay(quick: bool, device: str | None = None) -> BenchResult:
    """Replay off, base, reroute, full and forced balance on the device.

    device: `cpu` or `cuda`; None takes CUDA where there is one. Raises ValueError for cuda without
    a device.
    """
    import torch

    from app.bench.gpu_replay_kernels import Kernels

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: got cuda, no CUDA device is visible here; use --device cpu")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    setting = CUDA if device == "cuda" else CPU
    if quick:
        setting = replace(setting, num_windows=1, num_repeats=2)
    per_rank = setting.shape.num_experts // setting.topology.num_ep_ranks
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        kernels = Kernels(setting.shape, per_rank, device, setting.num_repeats)
        kernels.dense([64, 32])  # first calls choose algorithms and fill pools
        kernels.experts([16] * per_rank, 32)
        name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        return replay_on(setting, kernels, name)
    finally:
        torch.set_num_threads(num_threads)


def replay_on(setting: Setting, kernels: Calls, device: str) -> BenchResult:
    """Plan every window under every policy, execute all rows, and compare with the model."""
    totals: dict[str, list[np.ndarray]] = {name: [] for name in (*COMPARED, FORCED)}
    points: dict[str, list[tuple[float, float]]] = {name: [] for name in totals}
    carried: dict[str, Placement] = {}
    windows = list(synthetic_windows(setting.corpus, setting.num_windows, seed=0))
    steps = [(window, name) for window in windows for name in totals]
    identity = Placement.identity(
        windows[0].num_layers, windows[0].num_experts, setting.topology.num_ep_ranks
    )
    for window, name in track(steps, "gpu-replay"):
        policy = "off" if name == FORCED else name
        start = carried.get(name, identity)
        options = PlannerOptions(budget_seconds=None, budget_proposals=100_000, num_threads=1)
        plan = make_plan(window, setting.topology, setting.cost, start, policy, options)
        carried[name] = plan.placement
        executed = balanced(window) if name == FORCED else window
        seconds = execute(executed, plan.rows, plan.placement, setting.topology, kernels)
        modelled = model(executed, plan.rows, plan.placement, setting)
        points[name] += list(zip(modelled.ravel().tolist(), seconds.ravel().tolist()))
        totals[name].append(np.array([modelled.sum(axis=0).max(), seconds.sum(axis=0).max()]))
    return _result(totals, points, device)


def execute(
    window: Window, rows: Rows, placement: Placement, topology: Topology, kernels: Calls
) -> np.ndarray:
    """Synchronized seconds [row, EDP shard]: every rank runs, the slowest of each stage counts."""
    seconds = np.zeros((rows.num_rows, topology.num_shards))
    for work in rows_of(window, rows, topology, placement):
        seconds[work.row, work.shard] = _row_seconds(work, kernels)
    return seconds


def _row_seconds(work: RowWork, kernels: Calls) -> float:
    dense = max(kernels.dense(lengths.tolist()) for lengths in work.lengths)
    experts = sum(
        max(
            kernels.experts(tokens.tolist(), int(copies))
            for tokens, copies in zip(of_layer, copies_of_layer, strict=True)
        )
        for of_layer, copies_of_layer in zip(work.tokens, work.copies, strict=True)
    )
    return dense + experts


def model(window: Window, rows: Rows, placement: Placement, setting: Setting) -> np.ndarray:
    """J_rg [row, EDP shard] of Equation 15."""
    q = rank_demand(window.demand, placement)
    dense, expert = row_costs(window.length, q, rows, setting.topology, setting.cost)
    return dense + expert


def _result(
    totals: dict[str, list[np.ndarray]], points: dict[str, list[tuple[float, float]]], device: str
) -> BenchResult:
    sums = {name: np.sum(found, axis=0) for name, found in totals.items()}
    figures: dict[str, float] = {}
    errors = []
    for name in sums:
        if name == "off":
            continue
        modelled, measured = sums[name] / sums["off"]
        figures[f"gpu_replay.{name}_over_off"] = float(measured)
        figures[f"gpu_replay.model_{name}_over_off"] = float(modelled)
        errors.append(abs(modelled / measured - 1))
    pairs = np.array([pair for found in points.values() for pair in found])
    figures["gpu_replay.correlation"] = float(np.corrcoef(pairs.T)[0, 1])
    figures["gpu_replay.max_rel_error"] = float(max(errors))
    figures["gpu_replay.rows"] = float(len(pairs))
    details: dict[str, Any] = {"device": device, "rows": points}
    return BenchResult(figures=figures, details=details)
