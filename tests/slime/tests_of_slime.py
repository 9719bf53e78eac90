"""What several slime tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def load_all(folder: Path) -> dict[str, Any]:
    """Every tensor of a Hugging Face folder."""
    from safetensors.torch import load_file

    state: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        state |= load_file(path)
    return state


def largest_gradient_difference(expected_folder: Path, got_folder: Path) -> tuple[float, str]:
    """(|g - g'| / |g|, tensor) of the worst tensor of two runs' first step, by logical name.

    Tensors with |g| <= 1e-8 are left out (definitions.md, Equivalence).
    """
    from slime_on_cpu.dump_gradients import read

    expected, got = read(expected_folder), read(got_folder)
    assert expected and got.keys() == expected.keys()
    found = [
        (((got[name] - gradient).norm() / gradient.norm()).item(), name)
        for name, gradient in expected.items()
        if gradient.norm() > 1e-8
    ]
    return max(found)
