"""Each package's README: short, true about its files, with an example that runs."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from paths import ROOT

PACKAGES = ("planner", "rollout_hooks", "train_hooks", "app")


@pytest.mark.parametrize("package", PACKAGES)
def test_the_example_of_a_package_runs(package):
    text = (ROOT / package / "README.md").read_text()
    assert len(text.splitlines()) <= 40
    (example,) = re.findall(r"```python\n(.*?)```", text, re.S)
    done = subprocess.run(
        [sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_a_packages_readme_names_every_room_and_file_at_its_top(package):
    text = (ROOT / package / "README.md").read_text()
    named = {name.split(".")[0].rstrip("/") for name in re.findall(r"`([\w./]+)`", text)}
    for path in (ROOT / package).iterdir():
        if path.stem.startswith("_") or path.suffix not in ("", ".py"):
            continue
        assert path.stem in named or path.stem.startswith("slime"), f"{path} is not in its README"
