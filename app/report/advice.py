"""Sections of `routepack advise`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.report.charts import bars
from app.report.page import Section, numbers, table
from app.report.plan_charts import figure
from app.report.shared import heat_map_section, rows_section
from app.report.svg import element


def advice_sections(content: Mapping[str, Any]) -> list[Section]:
    """All sections of an advice's JSON; raises KeyError for a file of another shape."""
    figures, details = content["figures"], content["details"]
    return [
        _answer(figures, details),
        _policies(details),
        heat_map_section(details),
        rows_section(details),
        _neighbours(details),
        Section(
            "What this rests on",
            "Modelled work; dispatch and combine traffic is not modelled, so a real job gains "
            "less. In the paper 20.6% of modelled cost became 4.4% to 11.9% of measured "
            "throughput on H20-3e and 1.92% on H200, where reroute alone lost 0.3%.",
            blocks=[table(("value", "taken as", "from"), details["assumptions"])],
        ),
    ]


def _answer(figures: Mapping[str, float], details: Mapping[str, Any]) -> Section:
    values = {
        "modelled training time saved by full": f"{figures['advise.full.saved']:.1%}",
        "busiest EP rank over mean, identity": f"{figures['advise.rank_max_over_mean']:.2f}",
        "experts moved per window": f"{figures['advise.full.moved_experts']:.0f}",
    }
    if "advise.full.net_seconds" in figures:
        values["net seconds per window"] = f"{figures['advise.full.net_seconds']:+.2f}"
    answer = element("p", details["answer"], class_="answer")
    return Section("Answer", details["job"], blocks=[answer, numbers(values)])


def _policies(details: Mapping[str, Any]) -> Section:
    found = details["policies"]
    saved = {policy: 100 * row["saved"] for policy, row in found.items()}
    header = ("policy", *(name for name in next(iter(found.values()))["table"]))
    rows = [[policy, *row["table"].values()] for policy, row in found.items()]
    section = Section(
        "Policies against slime's own schedule",
        "Means over windows, each policy carrying its own placement from identity.",
        blocks=[table(header, rows)],
    )
    section.plots.append(
        figure(bars(saved, "modelled training time saved against off, %"), "Before moves are paid.")
    )
    nets = {policy: row["net_seconds"] for policy, row in found.items() if "net_seconds" in row}
    if nets:
        chart = bars(nets, "net seconds per window")
        section.plots.append(figure(chart, "After placing, moving and waiting for the search."))
    return section


def _neighbours(details: Mapping[str, Any]) -> Section:
    found = details["neighbours"]
    section = Section(
        "Neighbouring choices",
        "Same GPUs, modelled on the first window, relative to your choice under off. Memory and "
        "communication are not modelled: try only what fits.",
    )
    if found:
        rows = [[n["choice"], f"{n['off']:.3f}", f"{n['full']:.3f}", n["note"]] for n in found]
        section.blocks.append(table(("choice", "off", "full", "note"), rows))
        chart = bars({n["choice"]: n["full"] for n in found}, "modelled time under full over yours")
        section.plots.append(figure(chart, "Below 1 is faster than your choice under off."))
    return section
