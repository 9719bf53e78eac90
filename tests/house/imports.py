"""Who imports whom: every import in the sources, those inside functions too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from paths import ROOT

PACKAGES = ("planner", "rollout_hooks", "train_hooks", "app")


def sources() -> Iterator[Path]:
    """Every source file of the four packages."""
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    """`planner/placing/place.py` as planner.placing.place, `__init__.py` as its package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> frozenset[str]:
    return frozenset(module_name(path) for path in sources())


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def imported(path: Path) -> frozenset[str]:
    """Full names that a file imports anywhere, lazily or not; ours as the module, not the name."""
    found: set[str] = set()
    rooms = modules() - set(PACKAGES)
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules() else node.module for name in names}
        elif isinstance(node, ast.Constant) and node.value in rooms:
            found.add(node.value)  # run_fresh("app.bench.start_worker") and its like
    return frozenset(found)


def arrows() -> Iterator[tuple[str, str]]:
    """(importing module, imported name) of all sources."""
    for path in sources():
        for name in imported(path):
            yield module_name(path), name
