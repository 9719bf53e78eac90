"""Sections of an offline replay (`routepack replay`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.report.charts import bars
from app.report.page import Section, numbers, table
from app.report.plan_charts import figure
from app.report.shared import heat_map_section, rows_section
from planner.policies import FULL_OVER_OFF, POLICIES

_CHARTS = {
    "joint_saved": ("joint cost saved against base, %", 1, "Modelled cost (Equation 16)."),
    "global_excess": ("global EP excess, %", 100, "What no rows can remove (Section 4.2)."),
    "row_local_excess": ("row-local EP excess, %", 100, "What rows can remove (Section 4.2)."),
    "moved_experts": ("experts moved per window", 1, "Mean over windows."),
}


def replay_sections(content: Mapping[str, Any]) -> list[Section]:
    """All sections of a replay's JSON."""
    figures, details = content["figures"], content["details"]
    by_name = {
        name: {
            policy: factor * figures[f"replay.{policy}.{name}"]
            for policy in POLICIES
            if f"replay.{policy}.{name}" in figures
        }
        for name, (_, factor, _) in _CHARTS.items()
    }
    section = Section("Policies on the recorded windows")
    section.text = (
        f"{details.get('source')}; windows: {details.get('num_windows')}; {details.get('mode')} "
        "mode. Modelled work, not measured time."
    )
    for name, (axis, _, caption) in _CHARTS.items():
        if by_name[name]:
            section.plots.append(figure(bars(by_name[name], axis), caption))
    return [
        _headline(figures),
        section,
        heat_map_section(details),
        rows_section(details),
        _others(figures),
    ]


def _headline(figures: Mapping[str, float]) -> Section:
    section = Section("Full against off")
    try:
        full, off = (1 - figures[f"replay.{p}.joint_saved"] / 100 for p in FULL_OVER_OFF)
    except KeyError:
        section.absent.append("policies full and off; run routepack replay with both")
        return section
    values = {
        "modelled joint cost, full over off": f"{full / off:.3f}",
        "rows, full and off": (
            f"{figures['replay.full.rows']:.1f} / {figures['replay.off.rows']:.1f}"
        ),
        "experts moved per window": f"{figures['replay.full.moved_experts']:.0f}",
    }
    section.blocks.append(numbers(values))
    return section


def _others(figures: Mapping[str, float]) -> Section:
    """Figures of the other studies, by study."""
    rows = [
        [name, f"{value:.6g}"]
        for name, value in figures.items()
        if name.split(".")[1] not in POLICIES
    ]
    section = Section("Other studies")
    if rows:
        section.blocks.append(table(("figure", "value"), rows))
    return section
