"""Shared by all tests: the repository on the path, tiny runs, and real gloo ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_SILENT", "true")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Heavy tests first, so that no worker waits for a long one at the end."""

    def weight(item: pytest.Item) -> int:
        marks = {mark.name for mark in item.iter_markers()}
        return next((i for i, name in enumerate(("slime", "sglang", "ranks")) if name in marks), 3)

    items.sort(key=weight)


@pytest.fixture
def traces() -> Path:
    """The shipped GPT-OSS-20B traces."""
    return ROOT / "examples" / "traces" / "gpt_oss_20b"


@pytest.fixture
def in_tmp(tmp_path, monkeypatch) -> Path:
    """Run the test inside an empty folder, where commands write `runs/`."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
