"""The written pages hold: generated ones are current, quoted messages and paths exist."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from paths import ROOT

from app.local.metrics import METRICS
from app.reference.metrics import reference

PACKAGES = ("app", "planner", "rollout_hooks", "train_hooks")
PAGES = ("troubleshooting", "how-it-works", "extend", "wandb", "limits", "metrics")


def test_the_metric_reference_is_up_to_date():
    text = reference()
    assert (ROOT / "docs" / "metrics.md").read_text() == text
    for name, meaning in METRICS.items():
        assert f"| `routepack/{name}` |" in text
        assert meaning.strip()


def source_text() -> str:
    """All code with string literals joined across line ends, so that messages can be found."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    text = "\n".join(path.read_text() for path in files)
    return re.sub(r'"\s*\n\s*f?"', "", text)


def test_every_quoted_message_is_in_the_code():
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^\| `([^`]+)`", text, re.M)
    assert len(quoted) > 30
    code = source_text()
    missing = [message for message in quoted if message not in code]
    assert missing == []


@pytest.mark.parametrize("page", PAGES)
def test_paths_and_links_of_a_page_exist(page):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / "docs" / target).exists(), target
    pattern = r"`((?:app|planner|rollout_hooks|train_hooks|examples|configs|launch)/[\w./-]+)`"
    for target in re.findall(pattern, text):
        assert (ROOT / target).exists(), target


def test_the_limits_name_the_papers_weakest_results():
    text = (ROOT / "docs" / "limits.md").read_text()
    assert "+1.92% on\n  H200" in text and "lost 0.3% on H200" in text


def test_the_example_plans_the_shipped_trace_in_twenty_lines(traces):
    example = ROOT / "examples" / "plan_trace.py"
    code = [row for row in example.read_text().splitlines() if row.strip()]
    assert len(code) <= 22
    done = subprocess.run(
        [sys.executable, str(example), str(traces / "counts_703x24x32.npz")],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    saved = {row.split()[0]: row for row in done.stdout.splitlines()}
    assert set(saved) == {"off", "base", "reschedule", "reroute", "full"}
    assert "262 experts moved" in saved["full"]
