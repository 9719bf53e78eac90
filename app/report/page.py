"""The page around the sections: one file, its own style, no script and no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from xml.etree import ElementTree

from app.report.svg import Element, element

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; color: #1a1a1a;
  background: #fff; margin: 0 auto; padding: 1.5rem; max-width: 1220px; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .3rem;
  border-top: 1px solid #ddd; padding-top: 1rem; }
p { max-width: 80ch; margin: .3rem 0; } .lead { font-size: 1.1rem; }
.answer { font-size: 1.2rem; border-left: 4px solid #0072b2; padding: .4rem .9rem;
  background: #f4f8fb; }
.plots { display: flex; flex-wrap: wrap; gap: 1rem; }
figure { margin: .5rem 0; flex: 0 1 560px; min-width: 0; }
figcaption { color: #444; font-size: .85rem; max-width: 70ch; }
svg { max-width: 100%; height: auto; } svg text { font: 12px system-ui, "DejaVu Sans", sans-serif; }
svg text.small { font-size: 11px; }
.numbers { display: flex; flex-wrap: wrap; gap: .8rem; margin: .8rem 0; }
.numbers div { border: 1px solid #ccc; border-radius: 6px; padding: .5rem .9rem; min-width: 9rem; }
.numbers strong { display: block; font-size: 1.35rem; } .numbers span { font-size: .85rem;
  color: #444; }
table { border-collapse: collapse; font-size: .9rem; margin: .5rem 0; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #e4e4e4; }
th:first-child, td:first-child { text-align: left; } .absent { color: #555; font-style: italic; }
details { margin: .6rem 0; } summary { cursor: pointer; }
@media print { details { display: none; } }
"""


@dataclass(slots=True)
class Section:
    """A heading, what is to be seen, plots, tables, and what this JSON does not hold."""

    title: str
    text: str = ""
    plots: list[Element] = field(default_factory=list)
    blocks: list[Element] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Nothing to show, not even a reason."""
        return not (self.plots or self.blocks or self.absent or self.text)

    def render(self) -> Element:
        """The section as HTML."""
        return element(
            "section",
            element("h2", self.title),
            element("p", self.text) if self.text else None,
            *self.blocks,
            element("div", *self.plots, class_="plots") if self.plots else None,
            *(element("p", f"Not in this file: {name}", class_="absent") for name in self.absent),
        )


def page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The whole file as text."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("link", rel="icon", href="data:,"),
        element("title", title),
        element("style", STYLE),
    )
    body = element(
        "body",
        element("h1", title),
        element("p", lead, class_="lead"),
        *(section.render() for section in sections if not section.is_empty),
    )
    html = element("html", head, body, lang="en")
    return "<!DOCTYPE html>\n" + ElementTree.tostring(html, encoding="unicode", method="html")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Element:
    """A plain table; the first column is left-aligned."""
    return element(
        "table",
        element("thead", element("tr", *(element("th", name) for name in header))),
        element("tbody", *(element("tr", *(element("td", cell) for cell in row)) for row in rows)),
    )


def numbers(values: Mapping[str, str]) -> Element:
    """Large numbers with what they are below them."""
    boxes = (
        element("div", element("strong", value), element("span", name))
        for name, value in values.items()
    )
    return element("div", *boxes, class_="numbers")


def folded(title: str, content: Element) -> Element:
    """Content that opens on a click."""
    return element("details", element("summary", title), content)
