"""`routepack bench`: run the named benches, print every figure beside its bar, write the JSON."""

from __future__ import annotations

from collections.abc import Sequence

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
from app.results.figures import write_figures


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
    figures: dict[str, float] = {}
    skipped: dict[str, str] = {}
    details: dict[str, object] = {"quick": quick}
    for name in names:
        result = run_bench(name, quick, output, device)
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


def run_bench(name: str, quick: bool, output: str | None, device: str | None = None) -> BenchResult:
    """One bench by name."""
    if name == "placement":
        return bench_placement(quick)
    if name == "schedule":
        return bench_schedule(quick)
    if name == "slime":
        return bench_slime(quick)
    if name == "rows":
        return bench_rows(quick)
    if name == "scale":
        return bench_scale(quick, output)
    if name == "start":
        return bench_start(quick)
    if name == "commit":
        return bench_commit(quick)
    if name == "capture":
        return bench_capture(quick)
    if name == "admission":
        return bench_admission(quick)
    if name == "gpu-replay":
        return bench_gpu_replay(quick, device)
    raise ValueError(
        f"bench: got {name!r}, expected placement, schedule, slime, rows, scale, start, capture, "
        "commit, admission, gpu-replay"
    )
