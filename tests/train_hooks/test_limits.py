"""docs/limits.md says what is refused and what works with what; this holds it to the code."""

from __future__ import annotations

import re

from paths import ROOT

from app.matrix.compatibility import COMPATIBILITY, table
from app.matrix.layouts import RUN
from app.matrix.refusals import OF_JOBS, UNDER_EXPERTS

LIMITS = (ROOT / "docs/limits.md").read_text()


def section(title: str) -> str:
    return LIMITS.split(f"## {title}\n")[1].split("\n## ")[0]


def test_the_table_in_the_docs_is_the_table_in_the_code():
    written = [line for line in section("What works with what").splitlines() if line[:1] == "|"]
    assert written == table()


def test_each_entry_is_held_by_a_layout_a_refusal_or_a_test():
    known = {shape.name for shape in RUN} | {*UNDER_EXPERTS, *OF_JOBS}
    for entry in COMPATIBILITY:
        for name in entry.held_by:
            assert name in known or (ROOT / name).is_file(), (entry.setting, name)
        if "untested" not in (entry.rows, entry.moves):
            assert entry.held_by, entry.setting
        if entry.moves == "refused by name":
            assert {*entry.held_by} & {*UNDER_EXPERTS, *OF_JOBS}, entry.setting


def test_the_list_of_refusals_is_what_the_matrix_provokes():
    listed = re.findall(r"^- (.*)$", section("What is refused"), re.M)
    assert listed == [*UNDER_EXPERTS, *OF_JOBS]
    flags = re.findall(r"`(--[\w-]+)[^`]*`", section("What is refused").split("In slime,")[1])
    tested = (ROOT / "tests/app/slime/test_seams.py").read_text()
    assert len(flags) == 9 and all(flag in tested for flag in flags)


def test_every_setting_that_the_issue_names_has_a_line():
    settings = " ".join(entry.setting for entry in COMPATIBILITY)
    names = (
        "alltoall, DeepEP v1, DeepEP v2, HybridEP, blockwise fp8, fp8 parameters, INT4, CPU Adam"
    )
    names += ", precision-aware, EAGLE, PD, DP attention, MTP, CUDA graphs, LoRA, fully async"
    for name in names.split(", "):
        assert name in settings
