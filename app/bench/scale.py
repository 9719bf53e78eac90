"""Scale: a window of 4096 trajectories on D = EP = 64, and growth with N and with L x EP.

Every point is planned in a process of its own, whose peak memory is that of the plan and of the
window. For growth, the search draws a fixed number of proposals for each trajectory; exponents are
slopes of log cost over log size, 1 where growth is linear.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from app.bench.fresh import run_fresh
from app.bench.result import BenchResult
from app.results.progress import track

LARGE = {"num": 4096, "num_layers": 60, "num_experts": 512, "num_ranks": 64, "dp": 64}
BUDGET_SECONDS = 2.0
"""Search seconds of the large window."""
PROPOSALS_PER_TRAJECTORY = 400
NUMBERS = (512, 1024, 2048, 4096)
LAYERS_AND_RANKS = ((15, 16), (30, 16), (30, 32), (60, 32), (60, 64))
"""(L, EP) at N = 1024."""


def bench_scale(quick: bool, output: str | None = None) -> BenchResult:
    """Figures `scale.*`; a picture of the growth in `output`. Quick leaves out the growth."""
    large = run_fresh("app.bench.scale_worker", {**LARGE, "seconds": BUDGET_SECONDS})
    figures = {
        "scale.seconds": large["seconds"],
        "scale.eta": large["eta"],
        "scale.peak_mb": large["peak_mb"],
        "scale.window_mb": large["window_mb"],
        "scale.cpu_seconds": large["cpu_seconds"],
        "scale.place_seconds": large["place_seconds"],
        "scale.search_seconds": large["search_seconds"],
    }
    details = {"large": large}
    growth = [f"scale.{what}_exponent_{size}" for what in ("time", "memory") for size in _SIZES]
    if quick:
        reason = "quick: one point only"
        return BenchResult(figures=figures, skipped=dict.fromkeys(growth, reason), details=details)
    points = {"n": _by_number(), "lxep": _by_layers_and_ranks()}
    for size, found in points.items():
        sizes = np.array([point["size"] for point in found])
        for what in ("time", "memory"):
            values = np.array([point[what] for point in found])
            slope = np.polyfit(np.log(sizes), np.log(values), 1)[0]
            figures[f"scale.{what}_exponent_{size}"] = float(slope)
    if output is not None:
        draw_growth(points, Path(output) / "scale.png")
    return BenchResult(figures=figures, details={**details, "points": points})


_SIZES = ("n", "lxep")


def _by_number() -> list[dict[str, float]]:
    steps = [(n, {**LARGE, "num": n}) for n in NUMBERS]
    return _points(steps, "scale: N")


def _by_layers_and_ranks() -> list[dict[str, float]]:
    steps = []
    for layers, ranks in LAYERS_AND_RANKS:
        arguments = {**LARGE, "num": 1024, "num_layers": layers, "num_ranks": ranks}
        steps.append((layers * ranks, arguments))
    return _points(steps, "scale: L x EP")


def _points(steps: list[tuple[int, dict[str, int]]], title: str) -> list[dict[str, float]]:
    """Time is CPU seconds of a plan; memory is the peak less that of the imports."""
    points = []
    for size, arguments in track(steps, title):
        proposals = PROPOSALS_PER_TRAJECTORY * arguments["num"]
        found = run_fresh("app.bench.scale_worker", {**arguments, "proposals": proposals})
        memory = found["peak_mb"] - found["import_mb"]
        points.append({"size": size, "time": found["cpu_seconds"], "memory": memory, **found})
    return points


def draw_growth(points: dict[str, list[dict[str, float]]], path: Path) -> None:
    """CPU seconds and MB against N and L x EP, with the line of linear growth."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(9, 7), layout="constrained")
    labels = {"n": "trajectories N", "lxep": "L x EP"}
    for column, (size, found) in enumerate(points.items()):
        x = np.array([point["size"] for point in found])
        for row, (what, label) in enumerate((("time", "CPU seconds"), ("memory", "MB"))):
            y = np.array([point[what] for point in found])
            axes[row, column].loglog(x, y, marker="o", label="measured")
            axes[row, column].loglog(x, y[0] * x / x[0], ls="--", color="gray", label="linear")
            axes[row, column].set(xlabel=labels[size], ylabel=label)
            axes[row, column].set_xticks(x, [f"{int(value):,}" for value in x])
            axes[row, column].minorticks_off()
            axes[row, column].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
