"""Write docs/configuration.md: `python -m app.reference.configuration`."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, get_type_hints

from app.config import RunConfig

PATH = Path(__file__).parents[2] / "docs" / "configuration.md"
HEAD = """# Configuration

One YAML per run, such as `configs/local_tiny.yaml`. Every field has a default; a wrong value is
refused by name. This page is written by `python -m app.reference.configuration`.
"""


def reference() -> str:
    """Return the page: one table per section, in the order of the tree."""
    parts = [HEAD, "## Top level\n", _table(RunConfig)]
    for name, section in _sections(RunConfig).items():
        parts += [f"## {name}\n", (section.__doc__ or "").strip() + "\n", _table(section)]
    return "\n".join(parts)


def _sections(cls: type) -> dict[str, type]:
    hints = get_type_hints(cls)
    return {n: t for n, t in hints.items() if dataclasses.is_dataclass(t)}


def _table(cls: type) -> str:
    lines = ["| field | type | default | meaning |", "|---|---|---|---|"]
    fields: dict[str, Any] = cls.__pydantic_fields__
    for name, info in fields.items():
        if name in _sections(cls):
            continue
        kind = str(info.annotation).replace("typing.", "").removeprefix("<class '")
        kind = re.sub(r"app\.config\.\w+\.", "", kind.removesuffix("'>")).replace("|", "\\|")
        default = "required" if info.is_required() else f"`{info.get_default()}`"
        meaning = " ".join((info.description or "(undocumented)").split())
        lines.append(f"| `{name}` | {kind} | {default} | {meaning} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PATH.write_text(reference())
