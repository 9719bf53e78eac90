"""`routepack plan` writes the plan of one window; `routepack show` prints and draws it."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np

from app.commands.plan_file import Drawing, drawing_of, load_plan_file, save_plan_file
from app.results.figures import write_figures
from app.results.progress import print_table
from app.studies.recording import Recording
from planner.plan import Plan
from planner.policy import PlannerOptions, make_plan


def plan(
    recording: Recording,
    options: PlannerOptions,
    *,
    index: int,
    policy: str,
    carried_file: str | None,
    output: str,
    json_file: str | None,
) -> Plan:
    """Plan one window, validate it, write it and say so.

    index: the window's place in the source. carried_file: plan whose placement is in force.
    Raises ValueError when the source is too short or the carried placement does not fit.
    """
    if index >= len(recording.windows):
        raise ValueError(
            f"--window: got {index}, {recording.name} holds windows 0 to "
            f"{len(recording.windows) - 1}"
        )
    window = recording.windows[index]
    carried = recording.identity()
    if carried_file is not None:
        carried = load_plan_file(carried_file)[0].placement
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = make_plan(window, recording.topology, recording.cost, carried, policy, options)
    for text in dict.fromkeys(str(warning.message) for warning in caught):
        print(f"window {window.window_id}: {text}")
    made.validate(window, recording.topology, carried)
    drawing = drawing_of(made, window, recording.topology, recording.cost, carried, recording.name)
    save_plan_file(output, made, drawing)
    print(recording.title)
    _print_report(made)
    print(f"plan: {output}")
    write_figures(json_file, "plan", plan_figures(made), details=_details(made))
    return made


def show(path: str, num_rows: int, output: str | None, json_file: str | None) -> None:
    """Print a plan file's report and rows; draw it to `output`.

    Raises ValueError for a missing, damaged or foreign file.
    """
    made, drawing = load_plan_file(path)
    if drawing is not None:
        print(f"{path}: {drawing.source}, C {drawing.capacity}")
    _print_report(made)
    _print_rows(made, drawing, num_rows)
    if output is not None:
        from app.commands.plan_picture import draw_plan

        draw_plan(made, drawing, Path(output))
        print(f"picture: {output}")
    write_figures(json_file, "show", plan_figures(made), details=_details(made))


def plan_figures(made: Plan) -> dict[str, float]:
    """`plan.<name>` for every finite figure of the report."""
    return {
        f"plan.{name}": float(value)
        for name, value in made.report.items()
        if math.isfinite(float(value))
    }


def _details(made: Plan) -> dict[str, object]:
    return {
        "policy": made.policy,
        "window_id": made.window_id,
        "digest": made.digest(),
        "notes": made.notes,
    }


def _print_report(made: Plan) -> None:
    rows = [["policy", made.policy], ["window", str(made.window_id)]]
    rows += [[name, text] for name, text in made.notes.items()]
    rows += [[name, f"{value:.6g}"] for name, value in made.report.items()]
    version = f"{made.layout_version} -> {made.placement.version}"
    rows += [["layout version", version], ["digest", made.digest()[:16]]]
    print_table(f"Plan of window {made.window_id} under {made.policy}", ("report", "value"), rows)


def _print_rows(made: Plan, drawing: Drawing | None, num_rows: int) -> None:
    rows = made.rows
    shown = min(num_rows, rows.num_rows)
    count = np.bincount(rows.cell[rows.kept], minlength=rows.num_cells)
    count = count.reshape(rows.num_rows, rows.num_dp_slots)
    header = ["row", "trajectories", "fewest", "most"]
    if drawing is not None:
        header += ["tokens min", "tokens max", "cap used %", "dense", "expert"]
        tokens = rows.cell_tokens(drawing.length)
    table = []
    for row in range(shown):
        cells = [str(row), str(count[row].sum()), str(count[row].min()), str(count[row].max())]
        if drawing is not None:
            used = 100 * tokens[row].sum() / (rows.num_dp_slots * drawing.capacity)
            cells += [str(tokens[row].min()), str(tokens[row].max()), f"{used:.1f}"]
            cells += [f"{drawing.dense[row].max():.2f}", f"{drawing.expert[row].max():.2f}"]
        table.append(cells)
    more = "" if shown == rows.num_rows else f" (first {shown}; --rows {rows.num_rows} for all)"
    title = f"{rows.num_rows} rows of {rows.num_dp_slots} DP slots{more}"
    print_table(title, header, table)
    if drawing is None:
        print("tokens and costs are not in this file; `routepack plan` writes them beside the plan")
