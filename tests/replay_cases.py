"""Sizes and readers that the tests of the planner's commands share."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from planner.recorded.synthetic import TINY

CORPUS = replace(
    TINY,
    num_layers=3,
    num_experts=16,
    num_ranks=4,
    top_k=2,
    num_groups=6,
    group_size=8,
    max_response=400,
    response_log=(5.0, 0.6),
)
JOB = ["--dp", "4", "--ep", "4", "--capacity", "1600"]
QUICK = ["--proposals", "20000"]


def read_json(path: str | Path) -> dict:
    """Strict JSON: NaN and infinities are errors."""

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} in {path}")

    return json.loads(Path(path).read_text(), parse_constant=refuse)


def rewrite(path: str, **arrays: np.ndarray) -> None:
    """Replace arrays of an `.npz`; None removes one."""
    with np.load(path) as archive:
        held = {name: archive[name] for name in archive.files}
    held |= arrays
    np.savez(path, **{name: array for name, array in held.items() if array is not None})
