"""Real slime runs for the tests of this folder; they skip where slime cannot be imported.

Set ROUTEPACK_SLIME_PATH to slime's repository and Megatron's tree, joined by ':', or have both on
PYTHONPATH. One run (two rollouts on two CPU ranks under real Ray) takes 40 to 60 seconds.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXTRA = [p for p in os.environ.get("ROUTEPACK_SLIME_PATH", "").split(":") if p]
sys.path[:0] = [str(HERE), *EXTRA]


def _why_not() -> str | None:
    needed = ["slime", "slime.ray", "megatron.core", "megatron.training", "ray", "numpy"]
    needed += ["transformers", "sglang_router"]
    for name in needed:
        try:
            if importlib.util.find_spec(name) is None:
                return (
                    f"{name} is not importable: set ROUTEPACK_SLIME_PATH (tests/slime/conftest.py)"
                )
        except ImportError as error:
            return f"{name} is not importable: {error}"
    import numpy

    if int(numpy.__version__.split(".")[0]) > 1:
        return f"slime's Megatron needs numpy < 2, this environment has {numpy.__version__}"
    return None


WHY_NOT = _why_not()


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("slime") and WHY_NOT:
            item.add_marker(pytest.mark.skip(reason=WHY_NOT))


@dataclass(frozen=True)
class SlimeRun:
    """One finished run: its folder, its log, and the metrics of every optimizer step."""

    folder: Path
    log: str
    code: int

    @property
    def steps(self) -> list[dict[str, float]]:
        found = re.findall(r"step \d+: (\{[^{}]*\})", self.log)
        return [
            {k: float(v) for k, v in re.findall(r"'train/(\w+)': ([-+.\deinf]+)", text)}
            for text in found
        ]

    @property
    def routepack(self) -> list[dict[str, float]]:
        import json

        path = next(self.folder.glob("metrics-*.jsonl"), None)
        return [] if path is None else [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> Path:
    """The tiny checkpoint and four rollout dumps."""
    folder = tmp_path_factory.mktemp("slime_inputs")
    code = (
        "from slime_on_cpu.install import install; install()\n"
        "from pathlib import Path\n"
        "from slime_on_cpu import make_inputs as m\n"
        f"m.make_checkpoint(Path({str(folder)!r}) / 'hf'); m.make_rollouts(Path({str(folder)!r}))"
    )
    subprocess.run([sys.executable, "-c", code], env=_environment(folder), check=True)
    return folder


def _environment(output: Path, **more: str) -> dict[str, str]:
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


@pytest.fixture(scope="session")
def run_slime(inputs, tmp_path_factory):
    """Run MODULE (`train`, `app.slime_train`, ...) with slime's tiny arguments and more flags."""
    from slime_on_cpu.make_inputs import arguments as tiny_arguments

    finished: dict[tuple, SlimeRun] = {}

    def run(
        module: str,
        *flags: str,
        num_gpus: int = 2,
        ep: int = 2,
        config: str | None = None,
        arguments: list[str] | None = None,
        check: bool = True,
        timeout: float = 600,
        **environment: str,
    ) -> SlimeRun:
        key = (
            module,
            flags,
            num_gpus,
            ep,
            config,
            bool(arguments),
            tuple(sorted(environment.items())),
        )
        if key in finished:
            return finished[key]
        folder = tmp_path_factory.mktemp("slime_run")
        (folder / "torch_memory_saver_hook_mode_preload.abi3.so").touch()
        more = list(flags)
        if module != "train":
            (folder / "routepack.yaml").write_text(
                (config or "planner: {stop: cv, budget_seconds: 0.2, num_cores: 1}\n")
                + f"log: {{folder: {folder}}}\n"
            )
            more += ["--routepack-config", str(folder / "routepack.yaml")]
        command = [sys.executable, "-m", "slime_on_cpu.run_driver", module]
        command += [*(arguments or tiny_arguments(inputs, num_gpus=num_gpus, ep=ep)), *more]
        command = [part.replace("OUTPUT", str(folder)) for part in command]
        done = subprocess.run(
            command,
            env=_environment(folder, ROUTEPACK_TEST_GPUS=str(num_gpus), **environment),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        (folder / "log.txt").write_text(done.stdout)
        result = SlimeRun(folder=folder, log=done.stdout, code=done.returncode)
        if check and "DRIVER_DONE" not in done.stdout:
            raise AssertionError(f"{module} {flags} failed:\n{done.stdout[-6000:]}")
        finished[key] = result
        return result

    return run
