"""Sections of one training run (`routepack train`)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from app.report.charts import lines
from app.report.comparison import admission_spans
from app.report.page import Section, numbers
from app.report.plan_charts import figure, timeline
from app.report.shared import heat_map_section, rows_section


def training_sections(content: Mapping[str, Any]) -> list[Section]:
    """All sections of a run's JSON; raises KeyError for a file of another shape."""
    details = content["details"]
    windows, policy = details["windows"], details["policy"]
    return [
        _headline(content["figures"], policy, len(windows)),
        _curves("Throughput and window time", windows, _SPEED),
        _curves("Learning", windows, _LEARNING),
        heat_map_section(details),
        rows_section(details),
        _curves("Moved experts over windows", windows, _MOVES),
        _quality(windows),
        _admission(windows),
    ]


_SPEED = {"tps": "tokens per second", "window_seconds": "window seconds"}
_LEARNING = {"reward": "mean reward", "loss": "policy loss", "response_tokens": "response tokens"}
_MOVES = {"place/moved_experts": "experts moved", "place/moved_mb": "MB moved"}
_TIMES = ("place", "aux", "plan", "state", "batch_await")


def _headline(figures: Mapping[str, float], policy: str, num_windows: int) -> Section:
    values = {
        "tokens per second": f"{figures['train.tps']:,.0f}",
        "seconds per window": f"{figures['train.window_seconds']:.2f}",
        "ms exposed per window": f"{figures['train.exposed_ms']:.0f}",
        "reward, first to last window": (
            f"{figures['train.reward_first']:.3f} → {figures['train.reward_last']:.3f}"
        ),
        "fallbacks": f"{figures['train.fallback']:.0f}",
    }
    text = (
        f"{num_windows} windows. One run cannot tell one policy from another: "
        "routepack compare measures full against off on the same windows."
    )
    return Section(f"Policy {policy}", text, blocks=[numbers(values)])


def _curves(title: str, windows: Sequence[Mapping], names: Mapping[str, str]) -> Section:
    section = Section(title)
    for name, words in names.items():
        values = [m[name] for m in windows]
        chart = lines({words: values}, words, zero=name.startswith("place/"))
        section.plots.append(figure(chart, f"routepack/{name}"))
    return section


def _quality(windows: Sequence[Mapping]) -> Section:
    series = {
        "global length FFD": [m["plan/J0_over_B"] for m in windows],
        "the plan": [m["plan/J1_over_B"] for m in windows],
    }
    excess = {"excess removed": [m["plan/excess_removed"] for m in windows]}
    plots = [
        figure(lines(series, "joint cost over the bound B"), "1 cannot be beaten (Equation 17)."),
        figure(lines(excess, "eta", zero=True), "Share of the excess over B that search removed."),
    ]
    return Section("Plan quality against the bound", plots=plots)


def _admission(windows: Sequence[Mapping]) -> Section:
    middle = {name: statistics.median(m[f"time/{name}"] for m in windows) for name in _TIMES}
    plots = [figure(timeline(admission_spans(middle)), "Medians over windows, from sealing on.")]
    plots.append(
        figure(
            lines({"exposed": [m["exposed_ms"] for m in windows]}, "exposed ms", zero=True),
            "What planning, commit and waiting added before the first row.",
        )
    )
    return Section("Admission", plots=plots)
