"""One HTML page from the JSON content of a command, and both as files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from app.report.advice import advice_sections
from app.report.calibration import calibration_sections
from app.report.comparison import comparison_sections
from app.report.online import online_sections
from app.report.page import Section, page
from app.report.replay import replay_sections
from app.report.shared import figures_section
from app.report.training import training_sections
from app.results.figures import write_figures

MOST_BYTES = 3 * 2**20


def write_results(
    command: str,
    figures: dict[str, float],
    skipped: dict[str, str],
    details: dict[str, Any],
    json_path: str | Path | None,
    report_path: str | Path | None,
) -> None:
    """Write a command's JSON, its page, both or neither, as the paths say; offer the page.

    Raises ValueError for a page whose name does not end in .html.
    """
    write_figures(json_path, command, figures, skipped, details)
    if report_path is None:
        if json_path is not None:
            print(f"as a page: routepack report {json_path}")
        return
    content = {"command": command, "figures": figures, "skipped": skipped, "details": details}
    target = checked_page(report_path, "--report")
    write_page(content, target, f"routepack {command}" if json_path is None else str(json_path))
    print(f"report: {target} (open it in a browser)")


def checked_page(path: str | Path, flag: str) -> Path:
    """The page's path; raises ValueError naming `flag` unless it ends in .html."""
    target = Path(path)
    if target.suffix not in (".html", ".htm"):
        raise ValueError(f"{flag}: got {target}, expected a name that ends in .html")
    return target


def write_page(content: Mapping[str, Any], target: Path, source: str) -> None:
    """Write the page of one command's JSON content; raises ValueError for foreign content."""
    text = render(content, source)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")


def read_results(path: Path) -> dict[str, Any]:
    """Read a file of `--json FILE`; raises ValueError naming what is wrong with it."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file; a command writes one with --json FILE")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not JSON ({error}); give a file of --json FILE") from None
    parts = {"command": str, "figures": dict, "skipped": dict, "details": dict}
    if not isinstance(content, dict) or not all(
        isinstance(content.get(name), kind) for name, kind in parts.items()
    ):
        raise ValueError(f"{path}: expected the JSON of a routepack command, with {list(parts)}")
    return content


def render(content: Mapping[str, Any], source: str) -> str:
    """The page of one command's JSON.

    Raises ValueError when the command has no page or its JSON lacks what the page needs.
    """
    kinds: dict[str, Callable[[Mapping[str, Any]], list[Section]]] = {
        "compare": comparison_sections,
        "train": training_sections,
        "online": online_sections,
        "replay": replay_sections,
        "advise": advice_sections,
        "calibrate": calibration_sections,
    }
    command = content["command"]
    if command not in kinds:
        raise ValueError(
            f"{source}: written by routepack {command}, which has no page; expected one of "
            f"{', '.join(kinds)}"
        )
    try:
        sections = kinds[command](content)
    except (KeyError, TypeError, IndexError, ZeroDivisionError, AttributeError) as error:
        raise ValueError(
            f"{source}: a routepack {command} file that lacks {error}; write it again with this "
            "version's --json FILE"
        ) from error
    sections.append(figures_section(content))
    title = "routepack train --online" if command == "online" else f"routepack {command}"
    text = page(title, f"Drawn from {source}.", sections)
    if len(text.encode()) > MOST_BYTES:
        raise ValueError(f"{source}: the page would exceed 3 MB; compare fewer windows")
    return text
