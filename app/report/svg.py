"""Small pieces of inline SVG and HTML, built as elements so that every text is escaped.

Colours are Okabe and Ito's, told apart by people with any colour vision; heat maps use one hue of
rising darkness. Series also differ in marker or dash, so that a grey print still reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from planner.policies import POLICIES

Element = ElementTree.Element

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DASHES = ("", "6 3", "2 2", "8 3 2 3", "1 3", "10 2", "4 4")
POLICY_COLOUR = {
    **dict(zip(POLICIES, ("#000000", "#999999", "#e69f00", "#009e73", "#cc79a7", "#0072b2"))),
    "base (control)": "#999999",
    "ideal": "#56b4e9",
}
GREY, LIGHT = "#666666", "#dddddd"


def element(tag: str, *children: Element | str | None, **attributes: object) -> Element:
    """One element; `class_` and `stroke_width` become `class` and `stroke-width`."""
    names = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
    node = Element(tag, {name: _text(value) for name, value in names.items() if value is not None})
    for child in children:
        if child is None:
            continue
        if isinstance(child, str):
            if len(node):
                node[-1].tail = (node[-1].tail or "") + child
            else:
                node.text = (node.text or "") + child
        else:
            node.append(child)
    return node


def _text(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def label(x: float, y: float, text: str, anchor: str = "start", **more: object) -> Element:
    """Text with its baseline at (x, y)."""
    return element("text", text, x=x, y=y, text_anchor=anchor, **more)


def rectangle(
    x: float, y: float, width: float, height: float, title: str | None = None, **more: object
) -> Element:
    """A rectangle with a tool tip."""
    tip = element("title", title) if title else None
    return element("rect", tip, x=x, y=y, width=max(width, 0.3), height=height, **more)


def line(x1: float, y1: float, x2: float, y2: float, **more: object) -> Element:
    """A straight line, grey unless told otherwise."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, **{"stroke": LIGHT, **more})


def drawing(width: float, height: float, children: Sequence[Element], name: str) -> Element:
    """An SVG that shrinks with the page and keeps its proportions."""
    return element(
        "svg",
        element("title", name),
        *children,
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        width=f"{width:.0f}",
        height=f"{height:.0f}",
        role="img",
        xmlns="http://www.w3.org/2000/svg",
    )


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values from [low, high] to positions from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low or 1.0
        return self.start + (value - self.low) / span * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[float]:
        """Round values inside the range, at most about `most`."""
        span = self.high - self.low
        if span <= 0:
            return [self.low]
        rough = span / most
        power = 10.0 ** _floor_log10(rough)
        step = next(power * f for f in (1, 2, 5, 10) if power * f >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [k * step for k in range(first, last + 1)]


def _floor_log10(value: float) -> int:
    return int(f"{value:e}".split("e")[1])


def padded(values: Sequence[float], include: Sequence[float] = ()) -> tuple[float, float]:
    """(low, high) around the values and what must be seen, with a margin of 5%."""
    everything = [*values, *include]
    low, high = min(everything), max(everything)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def number(value: float) -> str:
    """A value for an axis or a tip: four significant digits, without exponents where short."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def shade(share: float) -> str:
    """Colour of a heat map's cell for a share in [0, 1]: white to dark blue."""
    share = min(max(share, 0.0), 1.0)
    low, high = (247, 251, 255), (8, 48, 107)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(low, high))
