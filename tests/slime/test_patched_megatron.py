"""The matrix of state layouts on the Megatron tree that slime builds, instead of PyPI's."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from paths import ROOT
from tests_of_slime import EXTRA

pytestmark = [pytest.mark.slime, pytest.mark.ranks]


def test_every_layout_moves_exactly_on_the_patched_tree(tmp_path):
    import megatron.core

    assert "site-packages" not in megatron.core.__file__, "slime's tree must come first"
    path = [str(ROOT), *EXTRA, os.environ.get("PYTHONPATH", "")]
    result = tmp_path / "matrix.json"
    done = subprocess.run(
        [sys.executable, "-m", "app.cli", "verify", "--matrix", "--json", str(result)],
        env={**os.environ, "PYTHONPATH": ":".join(p for p in path if p)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    figures = json.loads(result.read_text())["figures"]
    assert figures["verify.layouts_run"] >= 30
    assert figures["verify.layouts_exact"] == figures["verify.layouts_run"]
    assert figures["verify.negative_controls_failed"] == figures["verify.negative_controls"]
