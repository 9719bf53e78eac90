"""Capture: from SGLang's text to demand, one trajectory after another, on one core.

512 trajectories of 8k tokens, 40 MoE layers, top-8 of 256 experts. The worker holds a few encoded
trajectories, decodes and counts them in turn as responses come in, and keeps `[L, E]` of each.
"""

from __future__ import annotations

import argparse

from app.bench.fresh import run_fresh
from app.bench.result import BenchResult

NUM_TRAJECTORIES = 512
QUICK_TRAJECTORIES = 64
SHAPE = {"num_tokens": 8192, "num_layers": 40, "num_experts": 256, "top_k": 8}


def bench_capture(quick: bool) -> BenchResult:
    """Figures `capture.*`; rates are ids of the capture over CPU seconds of one thread.

    count_ids_per_s_core: compact routing to demand. decode_count_ids_per_s_core: base64 to demand
    with every check. speedup_vs_bincount: over the faster of two ways to call numpy.bincount on the
    same ids, interleaved, median of 7. peak_mb: what the stream adds to resident memory at its
    peak, the few encoded trajectories and all demand included.
    """
    num = QUICK_TRAJECTORIES if quick else NUM_TRAJECTORIES
    measured = run_fresh("app.bench.capture_worker", {"num_trajectories": num, **SHAPE})
    figures = {f"capture.{name}": value for name, value in measured.pop("figures").items()}
    return BenchResult(figures=figures, details={"num_trajectories": num, **SHAPE, **measured})


def main() -> None:
    """Run this bench alone: `python -m app.bench.capture [--quick] [--json FILE]`."""
    from app.bench.bars import print_figures
    from app.results.figures import write_figures

    parser = argparse.ArgumentParser(description=bench_capture.__doc__)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_TRAJECTORIES} trajectories")
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    arguments = parser.parse_args()
    result = bench_capture(arguments.quick)
    print_figures("bench capture", result.figures, result.skipped)
    write_figures(
        arguments.json, "bench capture", result.figures, result.skipped, {"capture": result.details}
    )


if __name__ == "__main__":
    main()
