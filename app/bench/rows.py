"""Row counts: windows whose R_min the inline packings certify, and what that costs."""

from __future__ import annotations

import time

import numpy as np

from app.bench.result import PAPER_PRESETS, BenchResult
from app.results.progress import track
from app.studies.recording import open_recording
from planner.packing.row_count import row_count


def bench_rows(quick: bool) -> BenchResult:
    """Figures `rows.*.{tiny,flash}`: certified windows (of 20), rows above the bound, seconds.

    Quick measures 5 windows, and names `certified_inline` as skipped: its bar is of 20.
    """
    figures: dict[str, float] = {}
    skipped: dict[str, str] = {}
    num_windows = 5 if quick else 20
    for suffix, source in PAPER_PRESETS.items():
        recording = open_recording(source, num_windows=num_windows)
        row_count(recording.windows[0].length, recording.topology)  # warm
        certified, above, seconds = 0, [], []
        for window in track(recording.windows, f"rows {suffix}"):
            start = time.perf_counter()
            found = row_count(window.length, recording.topology)
            seconds.append(time.perf_counter() - start)
            certified += found.certified
            above.append(found.value - found.bound)
        if quick:
            skipped[f"rows.certified_inline.{suffix}"] = "quick: 5 windows, the bar is of 20"
        else:
            figures[f"rows.certified_inline.{suffix}"] = float(certified)
        figures[f"rows.certified_share.{suffix}"] = certified / num_windows
        figures[f"rows.above_bound.{suffix}"] = float(np.mean(above))
        figures[f"rows.p50_seconds.{suffix}"] = float(np.median(seconds))
    return BenchResult(figures=figures, skipped=skipped)
