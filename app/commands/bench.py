"""`routepack bench`: run the named benches, print every figure beside its bar, write the JSON."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.bench.admission import bench_admission
from app.bench.bars import bar_of, missed, print_figures
from app.bench.capture import bench_capture
from app.bench.commit import bench_commit
from app.bench.gpu_replay import bench_gpu_replay
from app.bench.placement import bench_placement
from app.bench.result import BenchResult
from app.bench.rows import bench_rows
from app.bench.scale import bench_scale
from app.bench.schedule import bench_schedule
from app.bench.slime import bench_slime
from app.bench.start import bench_start
from app.commands.arguments import add_json
from app.results.figures import write_figures


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What the benches are asked: fewer windows, a folder for pictures, gpu-replay's device."""

    quick: bool
    output: str | None = None
    device: str | None = None


BENCHES: dict[str, Callable[[Settings], BenchResult]] = {
    "placement": lambda asked: bench_placement(asked.quick),
    "schedule": lambda asked: bench_schedule(asked.quick),
    "slime": lambda asked: bench_slime(asked.quick),
    "rows": lambda asked: bench_rows(asked.quick),
    "scale": lambda asked: bench_scale(asked.quick, asked.output),
    "start": lambda asked: bench_start(asked.quick),
    "capture": lambda asked: bench_capture(asked.quick),
    "commit": lambda asked: bench_commit(asked.quick),
    "admission": lambda asked: bench_admission(asked.quick),
    "gpu-replay": lambda asked: bench_gpu_replay(asked.quick, asked.device),
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "what",
        nargs="+",
        choices=(*BENCHES, "all"),
        metavar="BENCH",
        help=", ".join((*BENCHES, "or all")),
    )
    command.add_argument("--quick", action="store_true", help="fewer windows")
    command.add_argument(
        "--device", choices=("cpu", "cuda"), help="of gpu-replay (default: cuda where there is one)"
    )
    add_json(command)
    command.add_argument("--output", metavar="DIR", help="write pictures here")


def run(arguments: argparse.Namespace) -> int | None:
    names = tuple(BENCHES) if "all" in arguments.what else tuple(dict.fromkeys(arguments.what))
    bench(names, arguments.quick, arguments.output, arguments.json, arguments.device)


def bench(
    names: Sequence[str],
    quick: bool,
    output: str | None,
    json_file: str | None,
    device: str | None = None,
) -> dict[str, float]:
    """Run the benches in order and return all figures; a missed bar is printed, not an error.

    device: of gpu-replay; None takes CUDA where there is one.
    """
    asked = Settings(quick=quick, output=output, device=device)
    figures: dict[str, float] = {}
    skipped: dict[str, str] = {}
    details: dict[str, object] = {"quick": quick}
    for name in names:
        result = BENCHES[name](asked)
        print_figures(f"bench {name}", result.figures, result.skipped)
        figures |= result.figures
        skipped |= result.skipped
        details[name] = result.details
    late = missed(figures)
    bars = sum(bar_of(name) is not None for name in figures)
    print(
        f"{bars - len(late)} of {bars} bars met" + (f"; missed: {', '.join(late)}" if late else "")
    )
    details["missed"] = late
    write_figures(json_file, "bench", figures, skipped, details)
    return figures
