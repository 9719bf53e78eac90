"""`routepack doctor`: what this machine and environment can run; each failed line has its remedy.

Only metadata and files are read: nothing heavy is imported and nothing is started, so that it takes
a second or two.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from app.results.figures import write_figures
from app.results.progress import print_table

ROOT = Path(__file__).resolve().parents[2]
LOCAL_REMEDY = "pip install -e '.[local]' (launch/local.sh does it)"
SGLANG_REMEDY = "bash launch/sglang_venv.sh (2.6 GB, two to three minutes)"
SLIME_REMEDY = (
    "use slime's Docker image, or put its repository on PYTHONPATH; the `slime` on PyPI is another "
    "project"
)
PATCH_REMEDY = "in slime's repository: git apply docker/patch/latest/megatron.patch to Megatron-LM"
PATCH_MARK = "disable_param_buffers_cpu_backup"
"""A name that slime's megatron.patch adds to core/distributed/param_and_grad_buffer.py."""
MIN_CORES, MIN_MEMORY_GB, MIN_DISK_GB = 2, 4, 3
MIN_SGLANG = (0, 5, 15)
"""Returns routed experts by the wire contract that rollout_hooks reads; slime pins it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One line: what was found, what is wanted, and what to do when they differ."""

    name: str
    found: str
    wanted: str
    passed: bool
    remedy: str = ""


def doctor(needed: Sequence[str], json_file: str | None) -> bool:
    """Print every area, write the figures; True when all `needed` areas are ready."""
    areas: dict[str, Callable[[], list[Check]]] = {
        "local": check_local,
        "sglang": check_sglang,
        "slime": check_slime,
        "deepep": check_deepep,
    }
    titles = {
        "local": "Local demo (launch/local.sh)",
        "sglang": "SGLang capture on the CPU",
        "slime": "slime with RoutePack",
        "deepep": "DeepEP",
    }
    figures, skipped, lines = {}, {}, {}
    for area, find in areas.items():
        checks = find()
        ready = all(check.passed for check in checks)
        figures[f"doctor.{area}.ready"] = float(ready)
        figures[f"doctor.{area}.failed"] = float(sum(not check.passed for check in checks))
        lines[area] = [
            [c.name, c.found, c.wanted, "ok" if c.passed else "FAILED", c.remedy] for c in checks
        ]
        rows = [["✓" if c.passed else "✗", c.name, c.found, c.wanted] for c in checks]
        print_table(
            f"{titles[area]}: {'ready' if ready else 'not ready'}",
            ("", "what", "found", "wanted"),
            rows,
        )
        for check in checks:
            if not check.passed:
                print(f"  {check.name}: {check.remedy}")
    write_figures(json_file, "doctor", figures, skipped, {"checks": lines})
    missing = [area for area in needed if not figures[f"doctor.{area}.ready"]]
    if missing:
        print(f"not ready: {', '.join(missing)}; the lines above say what to do")
    else:
        print(f"ready: {', '.join(needed)}")
    return not missing


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
    return [_split(entry) for entry in found]


def _base(requirement: str) -> bool:
    return "extra ==" not in requirement or "local" in requirement.split("extra ==")[1]


def _split(requirement: str) -> tuple[str, str]:
    name, mark, version = re.match(r"([\w.-]+)\s*(==|>=)?\s*([\w.]*)", requirement).groups()
    return name, f"{mark} {version}" if mark else "any"


def _package(name: str, wanted: str) -> Check:
    found = version_of(name)
    return Check(
        name=name,
        found=found or "not installed",
        wanted=wanted,
        passed=found is not None and satisfies(found, wanted),
        remedy=LOCAL_REMEDY,
    )


def version_of(name: str, folders: Sequence[Path] | None = None) -> str | None:
    """Installed version of a distribution, here or in other site-packages; None if missing."""
    paths = {} if folders is None else {"path": [str(folder) for folder in folders]}
    found = next(iter(metadata.distributions(name=name, **paths)), None)
    return None if found is None else found.version


def satisfies(found: str, wanted: str) -> bool:
    """Whether a version meets `== X`, `>= X` or `any`; local parts such as +cpu do not count."""
    if wanted == "any":
        return True
    mark, version = wanted.split()
    have, need = release(found), release(version)
    return have == need if mark == "==" else have >= need


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version, as 2.13.0+cpu -> (2, 13, 0)."""
    return tuple(int(n) for n in re.match(r"[\d.]+", version + ".")[0].strip(".").split("."))


def has_gpu() -> bool:
    """Whether an NVIDIA device is on this machine, without asking its driver."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


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
            remedy=SGLANG_REMEDY,
        )
    ]
    pinned = ROOT / "requirements" / "sglang-cpu.txt"
    lines = pinned.read_text().splitlines() if pinned.is_file() else ["sglang==0.5.23"]
    wanted = dict(_split(line) for line in lines if line.startswith(("sglang==", "torch==")))
    for name, version in wanted.items():
        found = version_of(name, folders) if folders else None
        checks.append(
            Check(
                name=name,
                found=found or "not installed",
                wanted=version,
                passed=found is not None and satisfies(found, version),
                remedy=SGLANG_REMEDY,
            )
        )
    return checks


def check_slime() -> list[Check]:
    """slime, Ray, its SGLang, and a Megatron that carries slime's patch."""
    checks = [_slime(), *(_importable(name) for name in ("ray", "sglang"))]
    folder = _package_folder("megatron.core")
    patched = _has_mark(folder)
    checks.append(
        Check(
            name="Megatron with slime's patch",
            found="not installed" if folder is None else ("patched" if patched else "unpatched"),
            wanted="patched",
            passed=patched,
            remedy=PATCH_REMEDY,
        )
    )
    numpy = version_of("numpy")
    checks.append(
        Check(
            name="numpy for slime's Megatron",
            found=numpy or "not installed",
            wanted="< 2",
            passed=numpy is not None and release(numpy) < (2,),
            remedy="pip install 'numpy>=1.26,<2' in slime's environment (not in the local demo's)",
        )
    )
    return checks


def _slime() -> Check:
    folder = _package_folder("slime")
    real = folder is not None and (folder / "utils" / "dp_schedule.py").is_file()
    found = "not installed" if folder is None else (str(folder) if real else f"another: {folder}")
    return Check(
        name="slime",
        found=found,
        wanted="THUDM/slime with utils/dp_schedule.py",
        passed=real,
        remedy=SLIME_REMEDY,
    )


def _importable(name: str) -> Check:
    found = version_of(name)
    wanted = f">= {'.'.join(map(str, MIN_SGLANG))}" if name == "sglang" else "any"
    return Check(
        name=name,
        found=found or "not installed",
        wanted=wanted,
        passed=found is not None and satisfies(found, wanted),
        remedy="comes with slime's Docker image" if name == "sglang" else f"pip install {name}",
    )


def _package_folder(name: str) -> Path | None:
    """Where a package lies; `megatron` alone is looked up, not imported."""
    outer, _, inner = name.partition(".")
    try:
        spec = importlib.util.find_spec(outer)
    except (ImportError, ValueError):
        return None
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        folder = Path(place) / inner if inner else Path(place)
        if folder.is_dir():
            return folder
    return None


def _has_mark(folder: Path | None) -> bool:
    buffers = None if folder is None else folder / "distributed" / "param_and_grad_buffer.py"
    return buffers is not None and buffers.is_file() and PATCH_MARK in buffers.read_text()


def check_deepep() -> list[Check]:
    """A GPU and the deep_ep package."""
    folder = _package_folder("deep_ep")
    return [
        Check(
            name="NVIDIA GPU",
            found="found" if has_gpu() else "none",
            wanted="Hopper or newer",
            passed=has_gpu(),
            remedy="DeepEP has no CPU form; the alltoall dispatcher works everywhere",
        ),
        Check(
            name="deep_ep",
            found=version_of("deep_ep") or ("found" if folder else "not installed"),
            wanted="any",
            passed=folder is not None,
            remedy="build it from github.com/deepseek-ai/DeepEP, or use slime's Docker image",
        ),
    ]
