"""Sections of `routepack train --online`: do the policies learn, and do they learn alike?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from app.report.charts import bars, intervals, lines
from app.report.page import Section, numbers
from app.report.plan_charts import figure
from app.results.statistics import Spread

SMOOTHED = 5
"""Windows of the moving mean in the first chart."""


def online_sections(content: Mapping[str, Any]) -> list[Section]:
    """All sections of an online comparison's JSON; raises KeyError for a file of another shape."""
    figures, details = content["figures"], content["details"]
    curves = {
        policy: np.array(list(of_seed.values())) for policy, of_seed in details["curves"].items()
    }
    return [
        _headline(figures, curves),
        _curves(details["curves"], curves),
        _gains(figures, curves),
        _differences(figures, curves),
        _clipping(details["steps"]),
    ]


def _headline(figures: Mapping[str, float], curves: Mapping[str, np.ndarray]) -> Section:
    section = Section("Do the policies learn alike?")
    shown = {
        f"reward gain of {policy} (least of {len(curve)} seeds)": (
            f"{figures[f'online.reward_gain.{policy}']:+.3f} "
            f"({figures[f'online.reward_gain_min.{policy}']:+.3f})"
        )
        for policy, curve in curves.items()
    }
    section.blocks.append(numbers(shown))
    unlike = [p for p in curves if figures.get(f"online.alike.{p}") == 0]
    section.text = (
        f"The rewards of {', '.join(unlike)} differ from those of off: the interval misses 0."
        if unlike
        else "No policy's rewards can be told from those of off: every interval contains 0."
    )
    return section


def _curves(
    by_seed: Mapping[str, Mapping[str, list[float]]], curves: Mapping[str, np.ndarray]
) -> Section:
    section = Section("Reward curves")
    mean = {policy: _smooth(curve.mean(axis=0)).tolist() for policy, curve in curves.items()}
    caption = f"Mean over seeds, moving mean of {SMOOTHED} windows."
    section.plots.append(figure(lines(mean, "mean reward"), caption))
    for policy, of_seed in by_seed.items():
        series = {
            f"{policy}, seed {seed}": _smooth(np.array(values)).tolist()
            for seed, values in of_seed.items()
        }
        section.plots.append(figure(lines(series, "mean reward"), f"{policy}, every seed."))
    return section


def _smooth(values: np.ndarray) -> np.ndarray:
    width = min(SMOOTHED, len(values))
    return np.convolve(values, np.full(width, 1 / width), mode="valid")


def _gains(figures: Mapping[str, float], curves: Mapping[str, np.ndarray]) -> Section:
    found = {policy: figures[f"online.reward_gain.{policy}"] for policy in curves}
    chart = bars(found, "reward, last windows less first")
    return Section("Reward gained", plots=[figure(chart, "Mean over seeds.")])


def _differences(figures: Mapping[str, float], curves: Mapping[str, np.ndarray]) -> Section:
    spreads = {}
    for policy in curves:
        name = f"online.reward_difference.{policy}"
        if f"{name}.mean" in figures:
            mean, low, high = (figures[f"{name}.{end}"] for end in ("mean", "ci_low", "ci_high"))
            spreads[policy] = Spread(median=mean, low=low, high=high, q1=low, q3=high)
    section = Section("Reward less that of off, with 95% intervals")
    if spreads:
        chart = intervals(spreads, "reward less that of off, paired by seed and window", 0.0)
        caption = "Block bootstrap over seeds and windows. 0 inside: no difference is proven."
        section.plots.append(figure(chart, caption))
    else:
        section.absent.append("a policy beside off")
    return section


def _clipping(steps: Mapping[str, Mapping[str, list[list[Mapping[str, float]]]]]) -> Section:
    """Clip fraction of every optimizer step of a rollout, mean over policies and seeds."""
    runs = [run for of_seed in steps.values() for run in of_seed.values()]
    found = np.array([[[s["clip_fraction"] for s in window] for window in run] for run in runs])
    series = {
        f"optimizer step {k + 1}": (100 * found[:, :, k].mean(axis=0)).tolist()
        for k in range(found.shape[2])
    }
    chart = lines(series, "response tokens clipped, %", zero=True)
    return Section("Clipping", plots=[figure(chart, "Ratios leave 1 from the second step on.")])
