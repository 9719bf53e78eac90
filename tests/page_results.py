"""JSON of compare, train and replay with every field that the page draws, from real plans."""

from __future__ import annotations

from typing import Any

import numpy as np

from app.advise.study import identity
from app.results.plan_details import rank_load_detail, rows_detail
from planner.policies import COMPARED
from planner.policy import PlannerOptions, make_plan
from planner.recorded import preset

POLICIES = COMPARED


def plan_parts() -> dict[str, Any]:
    """`rank_load` and `rows` of one planned window of the Qwen3-30B preset."""
    source = preset("slime:qwen3-30b")
    window = next(iter(source.windows(1)))
    start = identity(window, source.topology)
    options = PlannerOptions(budget_seconds=0.05)
    plans = {
        policy: make_plan(window, source.topology, source.cost, start, policy, options)
        for policy in ("off", "full")
    }
    return {
        "rank_load": rank_load_detail(window, start, plans["full"].placement),
        "rows": {
            policy: rows_detail(plan, window, source.topology, source.cost)
            for policy, plan in plans.items()
        },
    }


def comparison(num_windows: int = 10) -> dict[str, Any]:
    """What `routepack compare` writes."""
    rng = np.random.default_rng(0)
    speed = {"off": 1.0, "base": 1.0, "reroute": 1.05, "full": 1.1, "base (control)": 1.0}
    measurements = []
    for window in range(num_windows):
        for policy, factor in {**speed, "ideal": 1.15}.items():
            moves = policy in ("reroute", "full")
            measurements.append(
                {
                    "window": window,
                    "policy": policy,
                    "tps": list(5000 * factor * (1 + 0.02 * rng.standard_normal(3))),
                    "window_seconds": float((1 + 0.02 * rng.standard_normal()) / factor),
                    "exposed": 0.05 if moves else 0.01,
                    "commit_seconds": 0.01,
                    "moved_experts": int(12 - window) if moves else 0,
                    "moved_mb": 2.0,
                    "rows": 7,
                    "joint_cost": 100 / factor,
                    "rank_max_over_mean": 1.1,
                    "loss": 0.1,
                    "loss_magnitude": 1.0,
                    "J1_over_B": 1.1 - 0.05 * moves,
                    "times": {"place": 0.01, "aux": 0.02, "plan": 0.2, "state": 0.1}
                    | {"batch_await": 0.11},
                }
            )
    figures = {"compare.headroom_share.full": 0.66, "compare.headroom_share.base": -0.02}
    return {
        "command": "compare",
        "figures": figures,
        "skipped": {"compare.headroom_share.reroute": "not measured in this test"},
        "details": {"measurements": measurements, **plan_parts()},
    }


def training(num_windows: int = 5) -> dict[str, Any]:
    """What `routepack train` writes."""
    from app.local.metrics import METRICS

    windows = [dict.fromkeys(METRICS, 0.1 * (i + 1)) for i in range(num_windows)]
    names = ("tps", "window_seconds", "exposed_ms", "reward_first", "reward_last", "fallback")
    return {
        "command": "train",
        "figures": {f"train.{name}": 1.0 for name in names},
        "skipped": {},
        "details": {"policy": "full", "windows": windows, **plan_parts()},
    }


def learned(num_windows: int = 12) -> dict[str, Any]:
    """What `routepack train --online` writes: three policies that learn alike, two seeds."""
    rng = np.random.default_rng(2)
    rise = np.linspace(0.3, 0.5, num_windows)
    curves = {
        policy: {
            str(seed): (rise + 0.03 * rng.standard_normal(num_windows)).tolist()
            for seed in (42, 43)
        }
        for policy in ("off", "base", "full")
    }
    figures = {}
    for policy in curves:
        figures |= {f"online.reward_gain.{policy}": 0.2, f"online.reward_gain_min.{policy}": 0.18}
    for policy in ("base", "full"):
        name = f"online.reward_difference.{policy}"
        figures |= {f"{name}.mean": 0.002, f"{name}.ci_low": -0.01, f"{name}.ci_high": 0.02}
        figures[f"online.alike.{policy}"] = 1.0
    step = [{"clip_fraction": 0.0}, {"clip_fraction": 0.02}]
    steps = {policy: {"42": [step] * num_windows} for policy in curves}
    return {
        "command": "online",
        "figures": figures,
        "skipped": {},
        "details": {"num_edge_windows": 2, "curves": curves, "steps": steps},
    }


def replayed() -> dict[str, Any]:
    """What `routepack replay` writes."""
    figures = {}
    for k, policy in enumerate(("off", "observe", "base", "reschedule", "reroute", "full")):
        names = ("rows", "global_excess", "row_local_excess", "moved_experts", "joint_saved")
        figures |= {f"replay.{policy}.{name}": 0.1 * k for name in names}
    return {
        "command": "replay",
        "figures": figures | {"replay.placement.hit": 1.0},
        "skipped": {},
        "details": {
            "source": "synthetic:tiny",
            "num_windows": 20,
            "mode": "paper",
            **plan_parts(),
        },
    }


def calibration() -> dict[str, Any]:
    """What `routepack calibrate` writes."""
    rng = np.random.default_rng(1)
    stages = {name: 0.02 + 0.01 * rng.random(12) for name in ("attention", "dense_ffn", "experts")}
    measured = {name: (x * (1 + 0.03 * rng.standard_normal(12))) for name, x in stages.items()}
    names = ("r2_held_out", "r2_equal_tokens", "error_held_out.median", "seconds_per_cost")
    stage = {"name": "attention", "alpha": 5.0, "beta": 3.0}
    return {
        "command": "calibrate",
        "figures": {f"calibrate.{name}": 0.9 for name in names},
        "skipped": {"calibrate.tps_over_default.median": "not asked for"},
        "details": {
            "device": "cpu",
            "capacity": 512,
            "sizes": {"num_fitted": 6, "num_held_out": 3, "num_equal": 3},
            "measured": sum(measured.values()).tolist(),
            "predicted": sum(stages.values()).tolist(),
            "stage_measured": {name: x.tolist() for name, x in measured.items()},
            "stage_predicted": {name: x.tolist() for name, x in stages.items()},
            "stages": [stage],
            "default_stages": [stage],
        },
    }
