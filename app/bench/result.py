"""What every bench hands back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchResult:
    """Figures by name, what was not measured with the reason, and what was seen beside them."""

    figures: dict[str, float]
    skipped: dict[str, str] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)


PAPER_PRESETS = {"tiny": "synthetic:tiny", "flash": "synthetic:flash"}
"""Suffix of a figure, and the source it is measured on."""
