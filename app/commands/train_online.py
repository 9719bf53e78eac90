"""`routepack train --online`: policies that learn, and whether their rewards tell them apart.

Every policy trains a run of its own for each seed, from the same weights, on the same prompts. Off
and full are the same mathematics up to rounding, which sampling then amplifies: their curves may
differ window by window, but not in the mean.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from app.config import RunConfig
from app.local.ranks import run_ranks
from app.local.rollout_server import rollout_server
from app.local.self_calibration import measured_rows
from app.local.train import TrainRun, train_rank
from app.local.warmup import ensure_warm
from app.report.write import checked_page, write_results
from app.results.progress import print_table
from app.results.statistics import Interval, paired_curves
from rollout_hooks.admission import PlannerCalls

LEAST_GAIN = 0.1
REFERENCE = "off"

Runs = dict[str, dict[int, TrainRun]]
"""By policy and seed."""


def train_online(
    config: RunConfig,
    policies: tuple[str, ...],
    output: Path,
    json_path: str | None,
    *,
    num_windows: int | None = None,
    num_seeds: int | None = None,
    report: str | None = None,
) -> dict[str, float]:
    """Train every policy with every seed, print the table, write JSON and page; return figures.

    `off` is always among the policies: the others are compared with it.
    """
    if report is not None:
        checked_page(report, "--report")
    config = online_config(config, num_windows, num_seeds)
    policies = tuple(dict.fromkeys((REFERENCE, *policies)))
    runs: Runs = {policy: {} for policy in policies}
    weights = ensure_warm(config)
    for seed in range(config.seed, config.seed + config.online.num_seeds):
        for policy in policies:
            runs[policy][seed] = _one_run(config, policy, seed, weights, output)
    figures = online_figures(config, runs)
    details = {
        "config": asdict(config),
        "num_edge_windows": config.online.num_edge_windows,
        "curves": {
            policy: {str(seed): rewards_of(run).tolist() for seed, run in of_seed.items()}
            for policy, of_seed in runs.items()
        },
        "steps": {
            policy: {str(seed): run.steps for seed, run in of_seed.items()}
            for policy, of_seed in runs.items()
        },
    }
    write_results("online", figures, {}, details, json_path, report)
    _print(config, policies, figures)
    return figures


def online_config(
    config: RunConfig, num_windows: int | None = None, num_seeds: int | None = None
) -> RunConfig:
    """The run under its `online` section; fewer windows shorten the compared ends with them.

    Raises ValueError for a single window, which has no two ends.
    """
    online = config.online
    if num_seeds is not None:
        online = replace(online, num_seeds=num_seeds)
    if num_windows is not None:
        if num_windows < 2:
            raise ValueError(f"--windows: got {num_windows}, --online compares two ends: give 2")
        edge = min(online.num_edge_windows, max(1, num_windows // 2))
        online = replace(online, num_windows=num_windows, num_edge_windows=edge)
    return replace(
        config,
        name=f"{config.name}-online",
        online=online,
        rollout=online.rollout,
        tasks=online.tasks,
        train=replace(online.train, num_windows=online.num_windows),
        warmup=online.warmup,
        wandb=replace(config.wandb, group=f"{config.wandb.group}-online"),
    )


def _one_run(config: RunConfig, policy: str, seed: int, weights: Path, output: Path) -> TrainRun:
    folder = output / f"seed-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    seeded = replace(config, name=f"{config.name}-seed-{seed}", seed=seed)
    print(f"{policy}, seed {seed}", flush=True)
    with rollout_server(seeded, weights) as url:
        return run_ranks(
            train_rank,
            seeded,
            policy,
            str(weights),
            str(folder),
            PlannerCalls(),
            url,
            None,
            measured_rows,
        )


def rewards_of(run: TrainRun) -> np.ndarray:
    """Mean reward of every window."""
    return np.array([m["reward"] for m in run.history])


def gains(curves: np.ndarray, num_edge: int) -> np.ndarray:
    """[seed] mean reward of the last windows less that of the first, of curves [seed, window]."""
    return curves[:, -num_edge:].mean(axis=1) - curves[:, :num_edge].mean(axis=1)


def online_figures(config: RunConfig, runs: Runs) -> dict[str, float]:
    """Gain of every policy, and the difference of its curves from those of off."""
    edge = config.online.num_edge_windows
    curves = {
        policy: np.stack([rewards_of(run) for run in of_seed.values()])
        for policy, of_seed in runs.items()
    }
    figures = {
        "online.num_windows": float(config.online.num_windows),
        "online.num_seeds": float(config.online.num_seeds),
    }
    for policy, curve in curves.items():
        gain = gains(curve, edge)
        figures[f"online.reward_gain.{policy}"] = float(gain.mean())
        figures[f"online.reward_gain_min.{policy}"] = float(gain.min())
        figures[f"online.reward_first.{policy}"] = float(curve[:, :edge].mean())
        figures[f"online.reward_last.{policy}"] = float(curve[:, -edge:].mean())
        figures |= _training_figures(policy, list(runs[policy].values()))
        if policy == REFERENCE:
            continue
        found = paired_curves(curve - curves[REFERENCE], edge)
        name = f"online.reward_difference.{policy}"
        figures |= {f"{name}.mean": found.mean}
        figures |= {f"{name}.ci_low": found.low, f"{name}.ci_high": found.high}
        figures[f"online.alike.{policy}"] = float(found.holds_zero)
    return figures


def _training_figures(policy: str, runs: list[TrainRun]) -> dict[str, float]:
    windows = [m for run in runs for m in run.history]
    seconds = sum(m["time/train"] for m in windows)
    last = [m["clip_fraction_last"] for m in windows]
    return {
        f"online.tps.{policy}": sum(m["tps"] * m["time/train"] for m in windows) / seconds,
        f"online.clip_fraction_last.{policy}": float(np.mean(last)),
        f"online.fallback.{policy}": float(sum(run.history[-1]["fallback"] for run in runs)),
    }


def difference_of(figures: dict[str, float], policy: str) -> Interval:
    """The policy's mean difference from off with its interval, read back from the figures."""
    name = f"online.reward_difference.{policy}"
    return Interval(
        mean=figures[f"{name}.mean"],
        low=figures[f"{name}.ci_low"],
        high=figures[f"{name}.ci_high"],
    )


def _print(config: RunConfig, policies: tuple[str, ...], figures: dict[str, float]) -> None:
    rows: list[list[Any]] = []
    for policy in policies:
        row = [
            policy,
            f"{figures[f'online.reward_first.{policy}']:.3f}",
            f"{figures[f'online.reward_last.{policy}']:.3f}",
            f"{figures[f'online.reward_gain.{policy}']:+.3f}",
            f"{figures[f'online.reward_gain_min.{policy}']:+.3f}",
        ]
        if policy == REFERENCE:
            row += ["-", "-"]
        else:
            found = difference_of(figures, policy)
            row.append(f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]")
            row.append("yes" if found.holds_zero else "NO")
        row.append(f"{figures[f'online.clip_fraction_last.{policy}']:.2%}")
        row.append(f"{figures[f'online.tps.{policy}']:,.0f}")
        rows.append(row)
    edge = config.online.num_edge_windows
    header = (
        "policy",
        f"first {edge}",
        f"last {edge}",
        "gain",
        "least gain",
        "reward less off [95%]",
        "alike",
        "clipped, last step",
        "TPS",
    )
    title = (
        f"{config.name}: {config.online.num_windows} windows x {config.online.num_seeds} seeds, "
        f"{config.train.num_steps_per_rollout} optimizer steps a rollout; rewards"
    )
    print_table(title, header, rows)
    low = [p for p in policies if figures[f"online.reward_gain_min.{p}"] < LEAST_GAIN]
    met = "met by every policy and seed" if not low else f"MISSED by {', '.join(low)}"
    print(f"bar: reward gain >= {LEAST_GAIN} with every seed: {met}")
    print(
        "alike: the 95% interval of the paired difference of the curves (block bootstrap over "
        "seeds and windows) contains 0"
    )
