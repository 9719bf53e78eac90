"""The bar of every benched figure, and the table that sets each figure beside its bar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.results.progress import print_table


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure must be at least, or at most, a value."""

    relation: str
    """`>=` or `<=`."""
    value: float

    def met(self, figure: float) -> bool:
        return figure >= self.value if self.relation == ">=" else figure <= self.value

    def __str__(self) -> str:
        return f"{self.relation} {self.value:,.6g}"


BARS = {
    "placement.greedy_speedup_vs_eplb.tiny": Bar(">=", 40),
    "placement.greedy_speedup_vs_eplb.flash": Bar(">=", 40),
    "placement.cv_hit.tiny": Bar(">=", 1.0),
    "placement.cv_hit.flash": Bar(">=", 1.0),
    "placement.few_moves_cv_hit.tiny": Bar(">=", 1.0),
    "placement.few_moves_cv_hit.flash": Bar(">=", 1.0),
    "placement.few_moves_ratio.tiny": Bar("<=", 0.72),
    "placement.few_moves_ratio.flash": Bar("<=", 0.62),
    "schedule.proposals_per_s_core.tiny": Bar(">=", 3.0e6),
    "schedule.proposals_per_s_core.flash": Bar(">=", 1.8e6),
    "schedule.reference_eta.tiny": Bar(">=", 47),
    "schedule.reference_eta.flash": Bar(">=", 31),
    "schedule.eta_gain_1s.tiny": Bar(">=", 6),
    "schedule.eta_gain_1s.flash": Bar(">=", 6),
    "schedule.eta_gain_3s.tiny": Bar(">=", 5),
    "schedule.eta_gain_3s.flash": Bar(">=", 5),
    "schedule.eta_gain_worst.tiny": Bar(">=", 0),
    "schedule.eta_gain_worst.flash": Bar(">=", 0),
    "schedule.j1_over_bound_3s.tiny": Bar("<=", 1.075),
    "schedule.j1_over_bound_3s.flash": Bar("<=", 1.05),
    "schedule.seconds_to_reference.tiny": Bar("<=", 0.15),
    "schedule.seconds_to_reference.flash": Bar("<=", 0.15),
    "rows.certified_inline.tiny": Bar(">=", 20),
    "rows.certified_inline.flash": Bar(">=", 13),
    "scale.seconds": Bar("<=", 10),
    "scale.eta": Bar(">=", 20),
    "scale.peak_mb": Bar("<=", 2048),
    **{
        f"scale.{what}_exponent_{size}": Bar("<=", 1.0)
        for what in ("time", "memory")
        for size in ("n", "lxep")
    },
    "capture.count_ids_per_s_core": Bar(">=", 3e8),
    "capture.decode_count_ids_per_s_core": Bar(">=", 1.2e8),
    "capture.speedup_vs_bincount": Bar(">=", 3.5),
    "capture.peak_mb": Bar("<=", 128),
    "commit.time_over_all_to_all": Bar("<=", 1.4),
    "commit.copies_per_byte": Bar("<=", 0.6),
    "commit.host_copy_bytes_over_needed": Bar("<=", 1.05),
    "commit.groups_created": Bar("<=", 0),
    "commit.peak_over_staging": Bar("<=", 1.1),
    "admission.exposed_over_allowed": Bar("<=", 1),
    "admission.gate_tail_ms": Bar("<=", 10),
    "admission.state_slowdown": Bar("<=", 1.1),
    "start.first_plan_s": Bar("<=", 1.5),
    "start.import_s": Bar("<=", 1.2),
}

PAPER = {
    "schedule.saved_vs_base.tiny": "paper 6.39",
    "schedule.saved_vs_base.flash": "paper 3.69",
    "schedule.saved_vs_global_ffd.tiny": "paper 9.42",
    "schedule.saved_vs_global_ffd.flash": "paper 4.68",
}


def bar_of(name: str) -> Bar | None:
    """The bar of a figure; None where it is only reported."""
    if name.startswith("slime.saved_") and "_vs_off." in name:
        return Bar(">=", 0)
    if name.startswith("slime.full_over_"):
        return Bar("<=", 1)
    return BARS.get(name)


def missed(figures: dict[str, float]) -> list[str]:
    """Names of the figures that miss their bar."""
    return [
        name
        for name, value in figures.items()
        if (bar := bar_of(name)) is not None and not bar.met(value)
    ]


def print_figures(title: str, figures: dict[str, float], skipped: dict[str, str]) -> None:
    """One row for each figure: its value, its bar or the paper's value, and whether it is met."""
    rows: list[Sequence[str]] = []
    for name, value in figures.items():
        bar = bar_of(name)
        if bar is None:
            rows.append([name, f"{value:,.5g}", PAPER.get(name, ""), ""])
        else:
            rows.append([name, f"{value:,.5g}", str(bar), "yes" if bar.met(value) else "MISSED"])
    print_table(title, ("figure", "value", "bar", "met"), rows)
    for name, reason in skipped.items():
        print(f"skipped {name}: {reason}")
