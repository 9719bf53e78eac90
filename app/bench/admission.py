"""Bench of admission: is planning hidden under state loading, and does it slow state loading?

The embedded trainer's real processes, windows, planner and commit. State loading is what slime's
actors do on wake-up: weights and Adam moments copied back from host memory, then the commit.
"""

from __future__ import annotations

from statistics import median

from app.bench.result import BenchResult
from app.config import (
    ModelConfig,
    PlannerConfig,
    RanksConfig,
    RolloutConfig,
    RoutingSkewConfig,
    RunConfig,
)
from app.local.ranks import run_ranks

NUM_WINDOWS, NUM_REPEATS = 10, 5
QUICK_WINDOWS, QUICK_REPEATS = 3, 3
CONFIG = RunConfig(
    name="bench_admission",
    ranks=RanksConfig(world=2, ep=2),
    model=ModelConfig(
        num_layers=9,
        num_dense_layers=1,
        hidden_size=256,
        moe_ffn_hidden_size=256,
        num_experts=64,
    ),
    routing_skew=RoutingSkewConfig(expert_bias_std=0.1),
    rollout=RolloutConfig(num_groups=16, group_size=8, max_new_tokens=128),
    planner=PlannerConfig(capacity=2048, budget_seconds=0.03, stop="net_benefit"),
)
"""Experts hold nearly all weights, as in the models of the paper, so that loading them takes longer
than the planner's budget while sampling and training stay small enough for a CPU."""


def bench_admission(quick: bool) -> BenchResult:
    """Figures `admission.*`: medians over windows of medians over interleaved repeats.

    overlap: share of T_plan inside T_state (definitions.md, Times). gate_tail_ms: T_place beyond
    T_aux. state_slowdown: T_state with planning in parallel over T_state without, same commit.
    exposed_ms: sealing to the first row on the last rank, less the bare restore without RoutePack.
    exposed_over_allowed: that over the larger of 20 ms and 0.5% of the window's seconds. One
    warm-up window, which also prices moves for `stop: net_benefit`, is not counted.
    """
    windows = QUICK_WINDOWS if quick else NUM_WINDOWS
    repeats = QUICK_REPEATS if quick else NUM_REPEATS
    measured = run_ranks(measure_rank, CONFIG, windows, repeats)
    return BenchResult(figures=figures_of(measured), details={"windows": measured})


def measure_rank(config: RunConfig, windows: int, repeats: int) -> list[dict[str, float]]:
    """What every rank does; see `app.bench.admission_worker`."""
    from app.bench.admission_worker import measure

    return measure(config, windows, repeats)


def figures_of(windows: list[dict[str, float]]) -> dict[str, float]:
    """Medians over windows; a window's figure is itself a median over its repeats."""
    return {f"admission.{name}": median(window[name] for window in windows) for name in windows[0]}
