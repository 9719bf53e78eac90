"""What `plan` and `show` say of a plan: its report as a table, and its figures."""

from __future__ import annotations

import math

from app.results.progress import print_table
from planner.plan import Plan


def plan_figures(made: Plan) -> dict[str, float]:
    """`plan.<name>` for every finite figure of the report."""
    return {
        f"plan.{name}": float(value)
        for name, value in made.report.items()
        if math.isfinite(float(value))
    }


def plan_details(made: Plan) -> dict[str, object]:
    """What the JSON says beside the figures."""
    return {
        "policy": made.policy,
        "window_id": made.window_id,
        "digest": made.digest(),
        "notes": made.notes,
    }


def print_report(made: Plan) -> None:
    rows = [["policy", made.policy], ["window", str(made.window_id)]]
    rows += [[name, text] for name, text in made.notes.items()]
    rows += [[name, f"{value:.6g}"] for name, value in made.report.items()]
    version = f"{made.layout_version} -> {made.placement.version}"
    rows += [["layout version", version], ["digest", made.digest()[:16]]]
    print_table(f"Plan of window {made.window_id} under {made.policy}", ("report", "value"), rows)
