"""Sections that several commands share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.report.page import Section, folded, table
from app.report.plan_charts import figure, gantt, gantt_length, heat_maps


def heat_map_section(details: Mapping[str, Any]) -> Section:
    """Load of layer x EP rank before and after, from `details["rank_load"]`."""
    section = Section("Load of layer and EP rank")
    found = details.get("rank_load")
    if not found:
        section.absent.append("details.rank_load (before, after, layer_numbers)")
        return section
    chart = heat_maps(found["before"], found["after"], found["layer_numbers"])
    text = f"Window {found['window']}: identity placement before, the plan's placement after."
    section.plots.append(figure(chart, text))
    return section


def rows_section(details: Mapping[str, Any]) -> Section:
    """Rows as a Gantt of cells, from `details["rows"][policy]`."""
    section = Section("Rows as cells")
    found = details.get("rows")
    if not found:
        section.absent.append("details.rows (cells, dense, expert of a plan)")
        return section
    longest = max(gantt_length(rows) for rows in found.values())
    for policy, rows in found.items():
        text = f"{policy}: {len(rows['dense'])} rows of window {rows['window']}."
        section.plots.append(figure(gantt(rows, longest), text))
    return section


def figures_section(content: Mapping[str, Any]) -> Section:
    """Every figure, folded, and what was skipped with the reason."""
    rows = [[name, f"{value:.6g}"] for name, value in sorted(content["figures"].items())]
    section = Section("All figures")
    if rows:
        section.blocks.append(folded(f"{len(rows)} figures", table(("figure", "value"), rows)))
    skipped = [[name, str(reason)] for name, reason in content["skipped"].items()]
    if skipped:
        section.blocks.append(table(("skipped", "reason"), skipped))
    return section
