"""Draw the pictures of docs/how-it-works.md: `python -m app.reference.pictures`."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from app.advise.study import identity
from app.report.plan_charts import gantt, gantt_length, heat_maps
from app.report.svg import Element, element
from app.results.plan_details import rank_load_detail, rows_detail
from planner.policies import FULL_OVER_OFF
from planner.policy import PlannerOptions, make_plan
from planner.recorded import preset

FOLDER = Path(__file__).parent.parent.parent / "docs" / "pictures"
SOURCE = "slime:qwen3-30b"
STYLE = "text { font: 12px sans-serif } text.small { font-size: 11px } svg { background: #fff }"


def draw(folder: Path = FOLDER) -> list[Path]:
    """Write the load of layer x rank and the rows of off and full, of the first window."""
    known = preset(SOURCE)
    window = next(iter(known.windows(1)))
    start = identity(window, known.topology)
    options = PlannerOptions(budget_seconds=None, budget_proposals=200_000, num_threads=1)
    plans = {
        policy: make_plan(window, known.topology, known.cost, start, policy, options)
        for policy in reversed(FULL_OVER_OFF)
    }
    load = rank_load_detail(window, start, plans["full"].placement)
    rows = {name: rows_detail(p, window, known.topology, known.cost) for name, p in plans.items()}
    longest = max(gantt_length(found) for found in rows.values())
    charts = {
        "rank-load": heat_maps(load["before"], load["after"], load["layer_numbers"]),
        **{f"rows-{name}": gantt(found, longest) for name, found in rows.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    return [_write(folder / f"{name}.svg", chart) for name, chart in charts.items()]


def _write(path: Path, chart: Element) -> Path:
    chart.insert(0, element("style", STYLE))
    path.write_text(ElementTree.tostring(chart, encoding="unicode") + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    for written in draw():
        print(written)
