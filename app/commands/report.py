"""`routepack report JSON`: draw what a command's `--json FILE` wrote."""

from __future__ import annotations

import argparse
from pathlib import Path

from app.report.write import checked_page, read_results, write_page


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("results", metavar="JSON", help="what --json FILE wrote")
    command.add_argument(
        "--output", metavar="HTML", help="default: the JSON's name with .html instead"
    )


def run(arguments: argparse.Namespace) -> int | None:
    report(arguments.results, arguments.output)


def report(results: str, output: str | None) -> Path:
    """Write the page of one JSON file and return its path.

    Raises ValueError naming a file that is missing, damaged, or of no command that has a page.
    """
    source = Path(results)
    content = read_results(source)
    target = checked_page(source.with_suffix(".html") if output is None else output, "--output")
    write_page(content, target, str(source))
    print(f"report: {target} (open it in a browser)")
    return target
