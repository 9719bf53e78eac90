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
