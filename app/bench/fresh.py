"""Run a measurement in a fresh process, whose imports and peak memory are its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_fresh(module: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run `python -m module` with the arguments as JSON; return the last line of its output.

    Raises RuntimeError with the end of its error stream when it fails.
    """
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", module, json.dumps(arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{module} failed ({done.returncode}): {done.stderr[-800:]}")
    return json.loads(done.stdout.splitlines()[-1])


def peak_mb() -> float:
    """Peak resident memory of this process so far, MB (2^20 bytes), from /proc."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("VmHWM is not in /proc/self/status")
