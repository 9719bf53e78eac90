"""Start: import and first plan of a fresh process whose kernels are compiled and cached.

The first plan is one window under full with 10,000 proposals: what the first window waits for
beyond its search budget. Wall time, with CPU time beside it for a machine that is shared.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from app.bench.fresh import run_fresh
from app.bench.result import PAPER_PRESETS, BenchResult
from app.results.progress import track
from planner.recorded import preset, write_windows

REPEATS = 5
QUICK_REPEATS = 3


def bench_start(quick: bool) -> BenchResult:
    """Figures `start.*`: medians over processes; first_plan_s without suffix is the larger one."""
    seen: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = {}
        for suffix, source in PAPER_PRESETS.items():
            paths[suffix] = str(Path(folder) / f"{suffix}.npz")
            write_windows(paths[suffix], preset(source).windows(1))
            run_fresh("app.bench.start_worker", {"path": paths[suffix]})  # fill the cache
        for _ in track(range(QUICK_REPEATS if quick else REPEATS), "start"):
            for suffix, path in paths.items():
                found = run_fresh("app.bench.start_worker", {"path": path})
                for name, value in found.items():
                    key = name if name.startswith("import") else f"{name}.{suffix}"
                    seen.setdefault(key, []).append(value)
    figures = {f"start.{name}": float(np.median(values)) for name, values in seen.items()}
    for name in ("first_plan_s", "first_plan_cpu_s"):
        figures[f"start.{name}"] = max(figures[f"start.{name}.{s}"] for s in PAPER_PRESETS)
    return BenchResult(figures=figures, details={"values": seen})
