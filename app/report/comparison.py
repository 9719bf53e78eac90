"""Sections of a paired comparison (`routepack compare`)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from app.report.charts import bars, intervals, lines, scatter
from app.report.page import Section, numbers
from app.report.plan_charts import figure, timeline
from app.report.shared import heat_map_section, rows_section
from app.results.statistics import Spread, spread
from planner.policies import FULL_OVER_OFF, OFF, POLICIES

CONTROL, IDEAL = "base (control)", "ideal"


def comparison_sections(content: Mapping[str, Any]) -> list[Section]:
    """All sections of one comparison's JSON; raises KeyError for a file of another shape."""
    figures, details = content["figures"], content["details"]
    runs = _by_policy(details["measurements"])
    return [
        _headline(figures, runs, content["skipped"]),
        _ratios(runs),
        _ideal(figures, content["skipped"]),
        _modelled(runs),
        heat_map_section(details),
        rows_section(details),
        _moved(runs),
        _quality(runs),
        _admission(runs),
    ]


def _by_policy(measurements: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    grouped: dict[str, list[Mapping[str, Any]]] = {}
    for m in sorted(measurements, key=lambda m: m["window"]):
        grouped.setdefault(m["policy"], []).append(m)
    return grouped


def _tps(measurement: Mapping[str, Any]) -> float:
    return statistics.median(measurement["tps"])


def _ratio(above: Sequence[Mapping], below: Sequence[Mapping], of=_tps) -> Spread:
    return spread([of(a) / of(b) for a, b in zip(above, below, strict=True)])


def _headline(figures: Mapping[str, float], runs, skipped: Mapping[str, str]) -> Section:
    section = Section("Full against off")
    if not set(FULL_OVER_OFF) <= set(runs):
        section.absent.append("policies full and off; run routepack compare with both")
        return section
    tps = _ratio(runs["full"], runs["off"])
    window = _ratio(runs["full"], runs["off"], lambda m: m["window_seconds"])
    share = figures.get("compare.headroom_share.full")
    section.blocks.append(
        numbers(
            {
                f"tokens/s, full over off [{tps.low:.3f}, {tps.high:.3f}]": f"{tps.median:.3f}",
                f"window time, full over off [{window.low:.3f}, {window.high:.3f}]": (
                    f"{window.median:.3f}"
                ),
                "share of the forced-balance ideal": "-" if share is None else f"{share:.0%}",
                "windows": str(len(runs["off"])),
            }
        )
    )
    section.text = _verdict(tps, window)
    if CONTROL in runs:
        control = _ratio(runs[CONTROL], runs["base"])
        if not control.low <= 1 <= control.high:
            section.text += (
                f" The base/base control is {control.median:.3f} [{control.low:.3f}, "
                f"{control.high:.3f}] and misses 1.00: do not trust differences of this size."
            )
    if len(runs["off"]) < 10:
        section.text += " Fewer than 10 windows: the intervals are rough."
    if share is None:
        reason = skipped.get("compare.headroom_share.full", "not measured")
        section.absent.append(f"share of the ideal ({reason})")
    return section


def _verdict(tps: Spread, window: Spread) -> str:
    if tps.low > 1:
        words = "Full trains more tokens per second than off: the interval lies above 1."
    elif tps.high < 1:
        words = "Full is slower than off here: the interval lies below 1."
    else:
        words = "No difference in tokens per second is proven: the interval contains 1."
    if tps.low > 1 and window.low <= 1 <= window.high:
        words += " End to end, with planning and moves, the difference is not proven."
    return words


def _ratios(runs) -> Section:
    off = runs["off"]
    tps = {name: _ratio(found, off) for name, found in runs.items() if name != "off"}
    window = {
        name: _ratio(found, off, lambda m: m["window_seconds"])
        for name, found in runs.items()
        if name not in (OFF, IDEAL)
    }
    captions = (
        "Training region. Above 1 is faster than slime's own schedule.",
        "Admission, training and weight export. Below 1 is faster.",
    )
    plots = [
        figure(intervals(tps, "tokens per second over off"), captions[0]),
        figure(intervals(window, "window time over off"), captions[1]),
    ]
    return Section(
        "Ratios with 95% intervals", "Paired: every policy trained the same windows.", plots
    )


def _ideal(figures: Mapping[str, float], skipped: Mapping[str, str]) -> Section:
    name = "compare.headroom_share."
    shares = {k.removeprefix(name): v for k, v in figures.items() if k.startswith(name)}
    section = Section("Share of the forced-balance ideal")
    section.absent += [f"{k}: {v}" for k, v in skipped.items() if k.startswith(name)]
    if shares:
        section.text = (
            "Forced balance sends every expert the same number of tokens on the rows of off; 100% "
            "takes all of its gain. More is possible where rows improve too."
        )
        shown = {policy: f"{value:.0%}" for policy, value in shares.items()}
        chart = bars(shares, "(policy - off) / (ideal - off), tokens per second", shown)
        section.plots.append(figure(chart, "Negative: slower than off."))
    return section


def _modelled(runs) -> Section:
    """Modelled joint cost and measured time, both over off, one point for each window."""
    section = Section("Modelled and measured time")
    points: dict[str, list[tuple[float, float]]] = {}
    for policy, found in runs.items():
        if policy in (OFF, CONTROL, IDEAL):
            continue
        points[policy] = [
            (m["joint_cost"] / o["joint_cost"], _tps(o) / _tps(m))
            for m, o in zip(found, runs["off"], strict=True)
        ]
    if points:
        chart = scatter(points, "modelled joint cost over off", "measured training time over off")
        section.plots.append(
            figure(chart, "On the dashed line the model predicts the measured ratio exactly.")
        )
    return section


def _moved(runs) -> Section:
    moved = {
        policy: [float(m["moved_experts"]) for m in found]
        for policy, found in runs.items()
        if policy in POLICIES and POLICIES[policy].places
    }
    section = Section("Moved experts over windows")
    if moved:
        chart = lines(moved, "experts moved", zero=True)
        section.plots.append(figure(chart, "Over all layers; the first window starts at identity."))
        if len({tuple(values) for values in moved.values()}) < len(moved):
            section.text = "Policies that place alike move alike: their lines coincide."
    return section


def _quality(runs) -> Section:
    section = Section("Plan quality against the bound")
    found = {
        policy: [m["J1_over_B"] for m in ms]
        for policy, ms in runs.items()
        if policy != IDEAL and all("J1_over_B" in m for m in ms)
    }
    if found:
        chart = lines(found, "joint cost over the bound B")
        section.plots.append(figure(chart, "1 cannot be beaten by any rows (Equation 17)."))
    else:
        section.absent.append("measurements[].J1_over_B")
    return section


def _admission(runs) -> Section:
    section = Section("Admission")
    exposed = {
        policy: [1e3 * m["exposed"] for m in found]
        for policy, found in runs.items()
        if policy not in (IDEAL, CONTROL)
    }
    chart = lines(exposed, "exposed ms", zero=True)
    section.plots.append(
        figure(chart, "What planning, commit and waiting added before the first row.")
    )
    times = [m["times"] for m in runs.get("full", []) if m.get("times")]
    if times:
        middle = {name: statistics.median(t[name] for t in times) for name in times[0]}
        section.plots.append(
            figure(timeline(admission_spans(middle)), "Medians of full, from sealing on.")
        )
    else:
        section.absent.append("measurements[].times (place, aux, plan, state, batch_await)")
    return section


def admission_spans(times: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Start and end of each step from sealing on (Figure 9); times in seconds by short name."""
    place, aux = times["place"], times.get("aux", 0.0)
    state_end = place + times["state"]
    spans = {
        "place": (0.0, place),
        "rewards, statistics": (0.0, aux),
        "search rows": (place, place + times["plan"]),
        "state and commit": (place, state_end),
        "wait for rows": (state_end, state_end + times["batch_await"]),
    }
    if aux == 0.0:
        del spans["rewards, statistics"]
    return spans
