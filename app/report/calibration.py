"""Sections of `routepack calibrate`: modelled and measured seconds, by stage and for whole rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.report.charts import scatter
from app.report.page import Section, numbers, table
from app.report.plan_charts import figure

PARTS = {"fitted": "num_fitted", "held out": "num_held_out", "equal tokens": "num_equal"}


def calibration_sections(content: Mapping[str, Any]) -> list[Section]:
    """All sections of a calibration's JSON; raises KeyError for a file of another shape."""
    figures, details = content["figures"], content["details"]
    return [
        _headline(figures, details),
        _rows(details),
        _stages(details),
        Section(
            "Coefficients",
            "Of a full cell; C routed tokens on the busiest EP rank of one layer cost 1.",
            blocks=[table(("stage", "alpha", "beta"), _coefficients(details))],
        ),
    ]


def _headline(figures: Mapping[str, float], details: Mapping[str, Any]) -> Section:
    values = {
        "R2 of rows held out": f"{figures['calibrate.r2_held_out']:.3f}",
        "R2 of held-out rows of equal tokens": f"{figures['calibrate.r2_equal_tokens']:.3f}",
        "median error, held out": f"{figures['calibrate.error_held_out.median']:.1%}",
        "ms per unit of cost": f"{1e3 * figures['calibrate.seconds_per_cost']:.2f}",
    }
    if "calibrate.tps_over_default.median" in figures:
        values["TPS over default costs"] = f"{figures['calibrate.tps_over_default.median']:.3f}"
    text = f"Measured on {details['device']}, C = {details['capacity']} tokens."
    return Section("Fit", text, blocks=[numbers(values)])


def _rows(details: Mapping[str, Any]) -> Section:
    points, first = {}, 0
    for name, size in PARTS.items():
        part = slice(first, first + details["sizes"][size])
        points[name] = list(zip(details["predicted"][part], details["measured"][part]))
        first = part.stop
    chart = scatter(points, "modelled seconds of a row", "measured seconds", include=())
    caption = "On the dashed line the model is exact. Held-out rows were not fitted."
    return Section("Rows", plots=[figure(chart, caption)])


def _stages(details: Mapping[str, Any]) -> Section:
    section = Section("Modelled and measured time per stage")
    for name, measured in details["stage_measured"].items():
        points = {name: list(zip(details["stage_predicted"][name], measured))}
        chart = scatter(points, "modelled seconds", "measured seconds", include=())
        section.plots.append(figure(chart, f"{name}: all layers, forward and backward."))
    return section


def _coefficients(details: Mapping[str, Any]) -> list[list[str]]:
    found = [("", stage) for stage in details["stages"]]
    found += [("default: ", stage) for stage in details["default_stages"]]
    return [[f"{mark}{s['name']}", f"{s['alpha']:.3f}", f"{s['beta']:.3f}"] for mark, s in found]
