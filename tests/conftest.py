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


@pytest.fixture
def traces() -> Path:
    """The shipped GPT-OSS-20B traces beside the repository, or a skip with the reason."""
    folder = ROOT.parent / "shared" / "traces" / "gpt_oss_20b"
    if not folder.is_dir():
        pytest.skip(f"no traces at {folder}: they are kept outside the repository")
    return folder


@pytest.fixture
def in_tmp(tmp_path, monkeypatch) -> Path:
    """Run the test inside an empty folder, where commands write `runs/`."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
