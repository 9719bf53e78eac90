"""One line of `routepack doctor`, and how versions and packages are found."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One line: what was found, what is wanted, and what to do when they differ."""

    name: str
    found: str
    wanted: str
    passed: bool
    remedy: str = ""


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


def split_requirement(requirement: str) -> tuple[str, str]:
    """`numpy>=1.26` as (numpy, >= 1.26)."""
    name, mark, version = re.match(r"([\w.-]+)\s*(==|>=)?\s*([\w.]*)", requirement).groups()
    return name, f"{mark} {version}" if mark else "any"


def package_folder(name: str) -> Path | None:
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


def has_gpu() -> bool:
    """Whether an NVIDIA device is on this machine, without asking its driver."""
    return any(Path("/dev").glob("nvidia[0-9]*"))
