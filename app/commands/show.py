"""`routepack show`: print a plan file and draw its rows."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from app.commands.arguments import add_json, positive
from app.commands.plan_file import Drawing, load_plan_file
from app.commands.plan_report import plan_details, plan_figures, print_report
from app.results.figures import write_figures
from app.results.progress import print_table
from planner.plan import Plan


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("plan", metavar="PLAN.npz")
    command.add_argument("--rows", type=positive, default=12, metavar="N", help="rows to print")
    command.add_argument("--output", metavar="PNG", help="draw the rows here")
    add_json(command)


def run(arguments: argparse.Namespace) -> int | None:
    show(arguments.plan, arguments.rows, arguments.output, arguments.json)


def show(path: str, num_rows: int, output: str | None, json_file: str | None) -> None:
    """Print a plan file's report and rows; draw it to `output`.

    Raises ValueError for a missing, damaged or foreign file.
    """
    made, drawing = load_plan_file(path)
    if drawing is not None:
        print(f"{path}: {drawing.source}, C {drawing.capacity}")
    print_report(made)
    _print_rows(made, drawing, num_rows)
    if output is not None:
        from app.commands.plan_picture import draw_plan

        draw_plan(made, drawing, Path(output))
        print(f"picture: {output}")
    write_figures(json_file, "show", plan_figures(made), details=plan_details(made))


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
