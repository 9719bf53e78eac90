"""A plan as a picture: its rows as a Gantt chart of cells, and rank load before and after."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from app.commands.plan_file import Drawing
from planner.plan import Plan

DENSE, EXPERT, WAIT = "#4c72b0", "#dd8452", "#d0d0d0"
_RIGHT = {"fontsize": 8, "loc": "center left", "bbox_to_anchor": (1.0, 0.5)}


def draw_plan(plan: Plan, drawing: Drawing | None, path: Path) -> None:
    """Draw a plan; without a drawing, the number of trajectories of every cell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if drawing is None:
        figure = _counts(plan)
    else:
        figure, axes = plt.subplots(
            2, 1, figsize=(13, 7), gridspec_kw={"height_ratios": (3, 2)}, layout="constrained"
        )
        _gantt(axes[0], plan, drawing)
        _loads(axes[1], drawing)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)


def _gantt(axis: plt.Axes, plan: Plan, drawing: Drawing) -> None:
    """One lane for each DP slot; in a row: the cell's dense work, waiting, the shard's experts."""
    row_cost = (drawing.dense + drawing.expert).max(axis=1)
    starts = np.concatenate([[0.0], np.cumsum(row_cost)[:-1]])
    for shard, slots in enumerate(drawing.edp_shards):
        for slot in slots:
            work = drawing.cell_work[:, slot]
            peak = drawing.dense[:, shard]
            lane = (slot - 0.4, 0.8)
            axis.broken_barh(list(zip(starts, row_cost)), lane, color=WAIT, lw=0)
            axis.broken_barh(list(zip(starts, work)), lane, color=DENSE, lw=0)
            axis.broken_barh(
                list(zip(starts + peak, drawing.expert[:, shard])), lane, color=EXPERT, lw=0
            )
    for start in starts:
        axis.axvline(start, color="white", lw=0.6)
    total = float(row_cost.sum())
    axis.set_xlim(0, total)
    axis.set_ylim(plan.rows.num_dp_slots - 0.5, -0.5)
    num = plan.rows.num_dp_slots
    axis.set_yticks(range(0, num, max(1, num // 16)))
    axis.set(xlabel="modelled cost, rows in order", ylabel="DP slot")
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in (DENSE, EXPERT, WAIT)]
    axis.legend(handles, ("dense work of the cell", "busiest EP ranks", "waiting"), **_RIGHT)
    axis.set_title(
        f"window {plan.window_id}, {plan.policy}: {plan.rows.num_rows} rows, cost {total:.1f}",
        fontsize=10,
    )


def _loads(axis: plt.Axes, drawing: Drawing) -> None:
    """Busiest EP rank over the mean of every layer, before and after the placement."""
    places = np.arange(len(drawing.layer_numbers))
    for load, label, color, shift in (
        (drawing.load_before, "carried placement", "#8c8c8c", -0.2),
        (drawing.load_after, "planned placement", DENSE, 0.2),
    ):
        ratio = load.max(axis=1) / np.maximum(load.mean(axis=1), 1e-12)
        axis.bar(
            places + shift, ratio, width=0.4, label=f"{label}: {ratio.mean():.4f}", color=color
        )
    axis.axhline(1, color="black", ls="--", lw=0.8)
    axis.set_ylim(bottom=0.9)
    step = max(1, len(places) // 24)
    axis.set_xticks(places[::step], [str(n) for n in drawing.layer_numbers][::step])
    axis.set(xlabel="MoE layer", ylabel="rank max / mean")
    axis.legend(**_RIGHT)


def _counts(plan: Plan) -> plt.Figure:
    rows = plan.rows
    count = np.bincount(rows.cell[rows.kept], minlength=rows.num_cells)
    figure, axis = plt.subplots(figsize=(10, 4))
    image = axis.imshow(
        count.reshape(rows.num_rows, rows.num_dp_slots).T, aspect="auto", cmap="viridis"
    )
    axis.set(xlabel="row", ylabel="DP slot", title=f"window {plan.window_id}, {plan.policy}")
    figure.colorbar(image, ax=axis, label="trajectories")
    return figure
