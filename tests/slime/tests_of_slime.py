"""What several slime tests share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXTRA = [p for p in os.environ.get("ROUTEPACK_SLIME_PATH", "").split(":") if p]
"""slime's repository and Megatron's tree."""


def load_all(folder: Path) -> dict[str, Any]:
    """Every tensor of a Hugging Face folder."""
    from safetensors.torch import load_file

    state: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        state |= load_file(path)
    return state


def largest_gradient_difference(expected_folder: Path, got_folder: Path) -> tuple[float, str]:
    """(|g - g'| / |g|, tensor) of the worst tensor of two runs' first step, by logical name.

    Tensors with |g| <= 1e-8 are left out (definitions.md, Equivalence).
    """
    from slime_on_cpu.dump_gradients import read

    expected, got = read(expected_folder), read(got_folder)
    assert expected and got.keys() == expected.keys()
    found = [
        (((got[name] - gradient).norm() / gradient.norm()).item(), name)
        for name, gradient in expected.items()
        if gradient.norm() > 1e-8
    ]
    return max(found)


def slime_environment(output: Path, **more: str) -> dict[str, str]:
    """Environment of a process that runs slime on the CPU and writes into `output`."""
    path = [str(ROOT), str(HERE), *EXTRA, os.environ.get("PYTHONPATH", "")]
    fixed = {
        "PYTHONPATH": ":".join(p for p in path if p),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_DEDUP_LOGS": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "SLIME_ACCELERATOR": "cpu",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "ROUTEPACK_TEST_OUTPUT": str(output),
    }
    return {**os.environ, **fixed, **more}
