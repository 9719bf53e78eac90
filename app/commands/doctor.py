"""`routepack doctor`: what can run here and what is missing; each failed line has its remedy."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from app.commands.arguments import add_json
from app.doctor.check import Check
from app.doctor.deepep import check_deepep
from app.doctor.local import check_local
from app.doctor.sglang import check_sglang
from app.doctor.slime import check_slime
from app.results.figures import write_figures
from app.results.progress import print_table

AREAS: dict[str, tuple[str, Callable[[], list[Check]]]] = {
    "local": ("Local demo (launch/local.sh)", check_local),
    "sglang": ("SGLang capture on the CPU", check_sglang),
    "slime": ("slime with RoutePack", check_slime),
    "deepep": ("DeepEP", check_deepep),
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--need",
        nargs="+",
        choices=AREAS,
        default=["local"],
        metavar="AREA",
        help=f"exit with 1 unless these are ready: {', '.join(AREAS)} (default local)",
    )
    add_json(command)


def run(arguments: argparse.Namespace) -> int | None:
    return 0 if doctor(tuple(arguments.need), arguments.json) else 1


def doctor(needed: Sequence[str], json_file: str | None) -> bool:
    """Print every area, write the figures; True when all `needed` areas are ready."""
    figures, skipped, lines = {}, {}, {}
    for area, (title, find) in AREAS.items():
        checks = find()
        ready = all(check.passed for check in checks)
        figures[f"doctor.{area}.ready"] = float(ready)
        figures[f"doctor.{area}.failed"] = float(sum(not check.passed for check in checks))
        lines[area] = [
            [c.name, c.found, c.wanted, "ok" if c.passed else "FAILED", c.remedy] for c in checks
        ]
        rows = [["✓" if c.passed else "✗", c.name, c.found, c.wanted] for c in checks]
        print_table(
            f"{title}: {'ready' if ready else 'not ready'}",
            ("", "what", "found", "wanted"),
            rows,
        )
        for check in checks:
            if not check.passed:
                print(f"  {check.name}: {check.remedy}")
    write_figures(json_file, "doctor", figures, skipped, {"checks": lines})
    missing = [area for area in needed if not figures[f"doctor.{area}.ready"]]
    if missing:
        print(f"not ready: {', '.join(missing)}; the lines above say what to do")
    else:
        print(f"ready: {', '.join(needed)}")
    return not missing
