"""Pictures of a plan: rank load before and after, rows as a Gantt of cells, the admission."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.report.charts import RIGHT, TOP, WIDTH
from app.report.svg import (
    GREY,
    PALETTE,
    Element,
    Scale,
    drawing,
    element,
    label,
    line,
    number,
    rectangle,
    shade,
)

MOST_ROWS = 24
DENSE, EXPERT = "#0072b2", "#e69f00"


def heat_maps(before: Sequence, after: Sequence, layer_numbers: Sequence[int]) -> Element:
    """Load over the layer's mean, [layer][EP rank], before and after on one colour scale."""
    maps = {"before": _over_mean(before), "after": _over_mean(after)}
    values = [v for rows in maps.values() for row in rows for v in row]
    scale = Scale(min(values), max(max(values), min(values) + 1e-9), 0.0, 1.0)
    num_layers, num_ranks = len(before), len(before[0])
    size = max(5.0, min(22.0, 400 / num_layers))
    wide = max(6.0, min(48.0, 210 / num_ranks))
    parts: list[Element] = []
    left = 44.0
    for name, rows in maps.items():
        parts.append(label(left, TOP + 4, f"{name}: max/mean {_worst(rows):.3f}"))
        for k, row in enumerate(rows):
            y = TOP + 12 + k * size
            if num_layers <= 24 or k % 4 == 0:
                parts.append(
                    label(left - 5, y + size / 2 + 4, str(layer_numbers[k]), "end", class_="small")
                )
            for rank, value in enumerate(row):
                tip = f"layer {layer_numbers[k]}, EP rank {rank}: {value:.3f} of the mean"
                parts.append(
                    rectangle(left + rank * wide, y, wide, size, tip, fill=shade(scale(value)))
                )
                if size >= 14 and wide >= 34:
                    ink = "#ffffff" if scale(value) > 0.5 else "#000000"
                    at = (left + (rank + 0.5) * wide, y + size / 2 + 4)
                    parts.append(label(*at, f"{value:.2f}", "middle", class_="small", fill=ink))
        foot = TOP + 12 + num_layers * size
        parts.append(
            label(left + num_ranks * wide / 2, foot + 15, "EP rank", "middle", class_="small")
        )
        left += num_ranks * wide + 70
    foot = TOP + 12 + num_layers * size
    for k in range(40):
        parts.append(rectangle(44 + 4 * k, foot + 26, 4.2, 10, fill=shade(k / 39)))
    parts += [
        label(40, foot + 35, f"{scale.low:.2f}", "end", class_="small"),
        label(210, foot + 35, f"{scale.high:.2f} x the layer's mean", class_="small"),
    ]
    return drawing(max(left - 40, 420), foot + 46, parts, "Load of layer x EP rank")


def _over_mean(load: Sequence) -> list[list[float]]:
    means = [sum(row) / len(row) or 1.0 for row in load]
    return [[value / mean for value in row] for row, mean in zip(load, means)]


def _worst(rows: list[list[float]]) -> float:
    return max(max(row) for row in rows)


def gantt(rows: Mapping[str, Any], longest: float | None = None) -> Element:
    """Rows of one plan in modelled time: each DP slot's dense work, then the row's expert work.

    rows: what `plan_details.rows_detail` returns. longest: end of the x axis, to compare plans.
    """
    shards, num_rows = rows["edp_shards"], min(len(rows["dense"]), MOST_ROWS)
    num_slots = sum(len(shard) for shard in shards)
    height = max(8.0, min(18.0, 200 / num_slots))
    starts = _row_starts(rows, num_rows)
    x = Scale(0.0, longest or starts[-1], 64, WIDTH - RIGHT)
    shard_of = {slot: g for g, shard in enumerate(shards) for slot in shard}
    place = {slot: k for k, slot in enumerate(slot for shard in shards for slot in shard)}
    bottom = TOP + 18 + num_slots * height
    parts = _gantt_legend()
    for slot, k in place.items():
        parts.append(
            label(58, TOP + 18 + (k + 0.7) * height, f"slot {slot}", "end", class_="small")
        )
    for row, slot, work, lengths in rows["cells"]:
        if row >= num_rows:
            continue
        y, g = TOP + 18 + place[slot] * height, shard_of[slot]
        dense, expert = rows["dense"][row][g], rows["expert"][row][g]
        end = starts[row] + dense
        tip = (
            f"row {row}, slot {slot}: {len(lengths)} trajectories, {sum(lengths):,} tokens; dense "
            f"{work:.2f} of {dense:.2f}, expert {expert:.2f}"
        )
        parts += [
            rectangle(x(starts[row]), y + 1, x(work) - x(0), height - 2, tip, fill=DENSE),
            rectangle(x(end), y + 1, x(expert) - x(0), height - 2, tip, fill=EXPERT, opacity=0.8),
        ]
    parts += [
        line(x(start), TOP + 16, x(start), bottom + 3, stroke=GREY, stroke_width=1)
        for start in starts
    ]
    for tick in x.ticks():
        parts.append(label(x(tick), bottom + 16, number(tick), "middle", class_="small"))
    shown = "" if num_rows == len(rows["dense"]) else f" (first {num_rows} rows)"
    text = f"modelled time, 1 = C routed tokens on the busiest rank of a layer{shown}"
    parts.append(label((64 + WIDTH - RIGHT) / 2, bottom + 32, text, "middle", class_="small"))
    return drawing(WIDTH, bottom + 40, parts, "Rows as cells")


def gantt_length(rows: Mapping[str, Any]) -> float:
    """Modelled time at which the last drawn row ends."""
    return _row_starts(rows, min(len(rows["dense"]), MOST_ROWS))[-1]


def _row_starts(rows: Mapping[str, Any], num_rows: int) -> list[float]:
    starts = [0.0]
    for row in range(num_rows):
        costs = [d + e for d, e in zip(rows["dense"][row], rows["expert"][row])]
        starts.append(starts[-1] + max(costs))
    return starts


def _gantt_legend() -> list[Element]:
    return [
        rectangle(64, TOP - 4, 12, 10, fill=DENSE),
        label(80, TOP + 5, "attention and dense FFN of the cell", class_="small"),
        rectangle(290, TOP - 4, 12, 10, fill=EXPERT, opacity=0.8),
        label(306, TOP + 5, "experts; white is waiting", class_="small"),
    ]


def timeline(spans: Mapping[str, tuple[float, float]], axis: str = "seconds") -> Element:
    """Named spans (start, end) from sealing on, one under the other."""
    end = max(stop for _, stop in spans.values()) or 1.0
    x = Scale(0.0, end * 1.12, 150, WIDTH - RIGHT)
    bottom = TOP + 24 * len(spans)
    parts: list[Element] = [line(150, bottom, WIDTH - RIGHT, bottom, stroke=GREY)]
    for tick in x.ticks():
        parts += [
            line(x(tick), TOP, x(tick), bottom),
            label(x(tick), bottom + 15, number(tick), "middle", class_="small"),
        ]
    for k, (name, (start, stop)) in enumerate(spans.items()):
        y, colour = TOP + 24 * k + 4, PALETTE[k % len(PALETTE)]
        tip = f"{name}: {start:.4g} to {stop:.4g} {axis}"
        parts += [
            label(142, y + 12, name, "end"),
            rectangle(x(start), y, x(stop) - x(start), 16, tip, fill=colour),
            label(x(stop) + 4, y + 12, number(stop - start), class_="small"),
        ]
    parts.append(label((150 + WIDTH) / 2, bottom + 32, axis, "middle", class_="small"))
    return drawing(WIDTH, bottom + 40, parts, "Admission")


def figure(chart: Element, caption: str) -> Element:
    """A chart with its caption."""
    return element("figure", chart, element("figcaption", caption), class_="plot")
