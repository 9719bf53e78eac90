"""The JSON of every reporting command: figures, and what was not measured with the reason."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


def write_figures(
    path: str | Path | None,
    command: str,
    figures: dict[str, float],
    skipped: dict[str, str] | None = None,
    details: dict[str, Any] | None = None,
) -> None:
    """Write `{"command", "figures", "skipped", "details"}`; do nothing without a path.

    Raises ValueError for a figure that is not a finite number: name it in `skipped` instead.
    """
    for name, value in figures.items():
        if not math.isfinite(value):
            raise ValueError(f"figure {name} is {value}; leave it out and name it in skipped")
    if path is None:
        return
    content = {
        "command": command,
        "figures": {name: float(value) for name, value in figures.items()},
        "skipped": skipped or {},
        "details": details or {},
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
