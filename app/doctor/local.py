"""The embedded trainer's area: Python, packages, cores, memory, disk."""

from __future__ import annotations

import os
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path

from app.doctor.check import ROOT, Check, has_gpu, satisfies, split_requirement, version_of

REMEDY = "pip install -e '.[local]' (launch/local.sh does it)"
MIN_CORES, MIN_MEMORY_GB, MIN_DISK_GB = 2, 4, 3


def check_local() -> list[Check]:
    """Python, packages, cores, memory and disk of the embedded trainer."""
    python = sys.version_info[:3]
    checks = [
        Check(
            name="Python",
            found=".".join(map(str, python)),
            wanted=">= 3.10",
            passed=python >= (3, 10),
            remedy="PYTHON=python3.11 bash launch/local.sh",
        )
    ]
    checks += [_package(name, wanted) for name, wanted in local_requirements()]
    checks += [_cores(), _memory(), _disk()]
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    checks.append(
        Check(
            name="CUDA out of the way",
            found="visible" if has_gpu() and not hidden else "none visible",
            wanted="none visible",
            passed=not has_gpu() or hidden,
            remedy="export CUDA_VISIBLE_DEVICES= (the local demo patches torch for the CPU)",
        )
    )
    return checks


def local_requirements() -> list[tuple[str, str]]:
    """(package, version wanted) as pyproject.toml states them, base and `local` extra."""
    path = ROOT / "pyproject.toml"
    if path.is_file():
        text = path.read_text()
        lists = re.findall(r"^(?:dependencies|local) = \[(.*?)^\]", text, re.M | re.S)
        found = [entry for part in lists for entry in re.findall(r'"([^"]+)"', part)]
    else:
        found = [r.split(";")[0].strip() for r in metadata.requires("routepack") or [] if _base(r)]
    return [split_requirement(entry) for entry in found]


def _base(requirement: str) -> bool:
    return "extra ==" not in requirement or "local" in requirement.split("extra ==")[1]


def _package(name: str, wanted: str) -> Check:
    found = version_of(name)
    return Check(
        name=name,
        found=found or "not installed",
        wanted=wanted,
        passed=found is not None and satisfies(found, wanted),
        remedy=REMEDY,
    )


def _cores() -> Check:
    cores = len(os.sched_getaffinity(0))
    return Check(
        name="CPU cores",
        found=str(cores),
        wanted=f">= {MIN_CORES}",
        passed=cores >= MIN_CORES,
        remedy="it runs on fewer, but times mean nothing: one rank needs one core",
    )


def _memory() -> Check:
    text = Path("/proc/meminfo").read_text() if Path("/proc/meminfo").is_file() else ""
    match = re.search(r"MemAvailable:\s+(\d+)", text)
    free = int(match[1]) / 2**20 if match else 0.0
    return Check(
        name="free memory",
        found=f"{free:.1f} GB" if match else "unknown",
        wanted=f">= {MIN_MEMORY_GB} GB",
        passed=not match or free >= MIN_MEMORY_GB,
        remedy="close other programs; a rank takes about 1 GB",
    )


def _disk() -> Check:
    free = shutil.disk_usage(ROOT).free / 2**30
    installed = version_of("torch") is not None
    wanted = 0.5 if installed else MIN_DISK_GB
    return Check(
        name="free disk",
        found=f"{free:.1f} GB",
        wanted=f">= {wanted:g} GB",
        passed=free >= wanted,
        remedy=f"free some space under {ROOT}",
    )
