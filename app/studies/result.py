"""What every study hands back: one table for people, figures for machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyResult:
    """A study's table with its JSON figures (fractions, but for saved_*)."""

    title: str
    header: Sequence[str]
    rows: list[list[str]]
    figures: dict[str, float]
    skipped: dict[str, str] = field(default_factory=dict)
    """What was not measured, with the reason."""


def percent(value: float, digits: int = 2) -> str:
    """A fraction as per cent for a table."""
    return f"{100 * value:.{digits}f}"
