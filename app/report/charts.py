"""The kinds of chart on the page: intervals, lines, scatter, and bars; each returns one SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from app.report.svg import (
    DASHES,
    GREY,
    LIGHT,
    PALETTE,
    POLICY_COLOUR,
    Element,
    Scale,
    drawing,
    element,
    label,
    line,
    number,
    padded,
    rectangle,
)
from app.results.statistics import Spread

WIDTH, LEFT, RIGHT, TOP = 560, 150, 24, 12


def colour_of(name: str, index: int) -> str:
    """A policy's own colour, else one of the palette."""
    return POLICY_COLOUR.get(name, PALETTE[index % len(PALETTE)])


def intervals(spreads: Mapping[str, Spread], axis: str, reference: float = 1.0) -> Element:
    """Median and 95% interval of each name, beside a reference line."""
    ends = [value for s in spreads.values() for value in (s.low, s.high, s.median)]
    scale = Scale(*padded(ends, [reference]), LEFT, WIDTH - RIGHT)
    bottom = TOP + 26 * len(spreads)
    parts = _x_axis(scale, bottom, axis)
    parts.append(line(scale(reference), TOP, scale(reference), bottom, stroke=GREY))
    for k, (name, s) in enumerate(spreads.items()):
        y, colour = TOP + 26 * k + 13, colour_of(name, k)
        tip = f"{name}: {s.median:.3f} [{s.low:.3f}, {s.high:.3f}]"
        parts += [
            label(LEFT - 10, y + 4, name, "end"),
            line(scale(s.low), y, scale(s.high), y, stroke=colour, stroke_width=3),
            element("circle", element("title", tip), cx=scale(s.median), cy=y, r=5, fill=colour),
            label(scale(s.median), y - 8, f"{s.median:.3f}", "middle", class_="small"),
        ]
    return drawing(WIDTH, bottom + 40, parts, axis)


def bars(values: Mapping[str, float], axis: str, shown: Mapping[str, str] | None = None) -> Element:
    """One horizontal bar for each name, from zero."""
    scale = Scale(*padded([0.0, *values.values()]), LEFT, WIDTH - RIGHT - 40)
    bottom = TOP + 24 * len(values)
    parts = _x_axis(scale, bottom, axis)
    for k, (name, value) in enumerate(values.items()):
        y = TOP + 24 * k + 4
        start, end = sorted((scale(0.0), scale(value)))
        text = (shown or {}).get(name, number(value))
        parts += [
            label(LEFT - 10, y + 12, name, "end"),
            rectangle(start, y, end - start, 16, f"{name}: {text}", fill=colour_of(name, k)),
            label(max(end, scale(0.0)) + 5, y + 12, text, class_="small"),
        ]
    parts.append(line(scale(0.0), TOP, scale(0.0), bottom, stroke=GREY))
    return drawing(WIDTH, bottom + 40, parts, axis)


def lines(
    series: Mapping[str, Sequence[float]], y_axis: str, x_axis: str = "window", zero: bool = False
) -> Element:
    """One line for each name over 0, 1, 2, ..., with a legend; `zero` includes 0 on the y axis."""
    height, left = 220, 64
    values = [v for s in series.values() for v in s]
    most = max(len(s) for s in series.values())
    x = Scale(0, max(most - 1, 1), left, WIDTH - RIGHT)
    y = Scale(*padded(values, [0.0] if zero else []), height, TOP + 22)
    parts = [*_x_axis(x, height, x_axis, whole=True), *_y_axis(y, left, y_axis)]
    at = left
    for k, (name, ys) in enumerate(series.items()):
        colour, dash = colour_of(name, k), DASHES[k % len(DASHES)] or None
        points = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in enumerate(ys))
        parts.append(
            element(
                "polyline",
                points=points,
                fill="none",
                stroke=colour,
                stroke_width=2,
                stroke_dasharray=dash,
            )
        )
        parts += [
            element(
                "circle",
                element("title", f"{name}, {x_axis} {i}: {number(v)}"),
                cx=x(i),
                cy=y(v),
                r=2.5,
                fill=colour,
            )
            for i, v in enumerate(ys)
        ]
        parts += [
            line(at, TOP, at + 22, TOP, stroke=colour, stroke_width=2, stroke_dasharray=dash),
            label(at + 26, TOP + 4, name, class_="small"),
        ]
        at += 40 + 7 * len(name)
    return drawing(WIDTH, height + 40, parts, y_axis)


def scatter(
    points: Mapping[str, Sequence[tuple[float, float]]],
    x_axis: str,
    y_axis: str,
    include: Sequence[float] = (1.0,),
) -> Element:
    """Points of each name with the line on which x equals y; both axes show `include`."""
    height, left = 280, 64
    xs = [p[0] for s in points.values() for p in s]
    ys = [p[1] for s in points.values() for p in s]
    x = Scale(*padded(xs, include), left, WIDTH - RIGHT)
    y = Scale(*padded(ys, include), height, TOP + 22)
    low, high = max(x.low, y.low), min(x.high, y.high)
    parts = [*_x_axis(x, height, x_axis), *_y_axis(y, left, y_axis)]
    parts.append(line(x(low), y(low), x(high), y(high), stroke=GREY, stroke_dasharray="4 3"))
    at = left
    for k, (name, pairs) in enumerate(points.items()):
        colour = colour_of(name, k)
        parts += [
            _marker(k, x(a), y(b), colour, f"{name}: {number(a)} modelled, {number(b)} measured")
            for a, b in pairs
        ]
        parts += [_marker(k, at + 5, TOP, colour, name), label(at + 14, TOP + 4, name)]
        at += 36 + 7 * len(name)
    return drawing(WIDTH, height + 40, parts, y_axis)


def _marker(kind: int, x: float, y: float, colour: str, title: str) -> Element:
    """Circle, square, triangle or diamond, so that names differ without colour."""
    tip = element("title", title)
    if kind % 4 == 0:
        return element("circle", tip, cx=x, cy=y, r=4, fill=colour)
    if kind % 4 == 1:
        return element("rect", tip, x=x - 4, y=y - 4, width=8, height=8, fill=colour)
    corners = ((0, -5), (5, 4), (-5, 4)) if kind % 4 == 2 else ((0, -5), (5, 0), (0, 5), (-5, 0))
    points = " ".join(f"{x + a:.1f},{y + b:.1f}" for a, b in corners)
    return element("polygon", tip, points=points, fill=colour)


def _x_axis(scale: Scale, y: float, title: str, whole: bool = False) -> list[Element]:
    parts = [line(scale.start, y, scale.end, y, stroke=GREY)]
    for tick in scale.ticks():
        if whole and tick != round(tick):
            continue
        parts += [
            line(scale(tick), TOP, scale(tick), y, stroke=LIGHT),
            label(scale(tick), y + 15, number(tick), "middle", class_="small"),
        ]
    middle = (scale.start + scale.end) / 2
    return [*parts, label(middle, y + 32, title, "middle", class_="small")]


def _y_axis(scale: Scale, x: float, title: str) -> list[Element]:
    parts: list[Element] = [line(x, scale.start, x, scale.end, stroke=GREY)]
    for tick in scale.ticks(5):
        parts += [
            line(x, scale(tick), WIDTH - RIGHT, scale(tick), stroke=LIGHT),
            label(x - 6, scale(tick) + 4, number(tick), "end", class_="small"),
        ]
    y = (scale.start + scale.end) / 2
    turned = f"rotate(-90 14 {y:.0f})"
    return [*parts, label(14, y, title, "middle", class_="small", transform=turned)]
