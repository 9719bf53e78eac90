"""The area of SGLang on the CPU: its own environment beside the trainer's."""

from __future__ import annotations

import os
from pathlib import Path

from app.doctor.check import ROOT, Check, satisfies, split_requirement, version_of

REMEDY = "bash launch/sglang_venv.sh (2.6 GB, two to three minutes)"


def check_sglang() -> list[Check]:
    """The SGLang environment beside the trainer's: `.venv-sglang` or $SGLANG_VENV."""
    venv = Path(os.environ.get("SGLANG_VENV", ROOT / ".venv-sglang"))
    folders = sorted(venv.glob("lib/python3*/site-packages"))
    done = any(venv.glob("routepack-*"))
    checks = [
        Check(
            name="environment",
            found=f"{venv}" if done else ("half made" if venv.is_dir() else "missing"),
            wanted="made by launch/sglang_venv.sh",
            passed=done,
            remedy=REMEDY,
        )
    ]
    pinned = ROOT / "requirements" / "sglang-cpu.txt"
    lines = pinned.read_text().splitlines() if pinned.is_file() else ["sglang==0.5.23"]
    wanted = dict(
        split_requirement(line) for line in lines if line.startswith(("sglang==", "torch=="))
    )
    for name, version in wanted.items():
        found = version_of(name, folders) if folders else None
        checks.append(
            Check(
                name=name,
                found=found or "not installed",
                wanted=version,
                passed=found is not None and satisfies(found, version),
                remedy=REMEDY,
            )
        )
    return checks
