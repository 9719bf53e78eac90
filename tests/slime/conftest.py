"""Real slime runs for the tests of this folder; they skip where slime cannot be imported.

Set ROUTEPACK_SLIME_PATH to slime's repository and Megatron's tree, joined by ':', or have both on
PYTHONPATH. One run (two rollouts on two CPU ranks under real Ray) takes 40 to 60 seconds.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from tests_of_slime import EXTRA, slime_environment

sys.path[1:1] = EXTRA


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
            {k: float(v) for k, v in re.findall(r"'train/([\w-]+)': ([-+.\deinf]+)", text)}
            for text in found
        ]

    @property
    def routepack(self) -> list[dict[str, float]]:
        import json

        path = next(self.folder.glob("metrics-*.jsonl"), None)
        return [] if path is None else [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> Path:
    """The tiny checkpoint, prompts and four rollout dumps.

    The same with four layers in `deep`, there with nothing to gain in the last two in `one_stage`;
    dumps with nine siblings in `fan`.
    """
    folder = tmp_path_factory.mktemp("slime_inputs")
    code = (
        "from slime_on_cpu.install import install; install()\n"
        "from pathlib import Path\n"
        "from slime_on_cpu import make_inputs as m\n"
        f"m.make_checkpoint(Path({str(folder)!r}) / 'hf'); m.make_rollouts(Path({str(folder)!r}))\n"
        f"deep = Path({str(folder)!r}) / 'deep'\n"
        "m.make_checkpoint(deep / 'hf', num_layers=4); m.make_rollouts(deep, num_layers=4)\n"
        "stage = deep / 'one_stage'; stage.mkdir()\n"
        "m.make_rollouts(stage, num_layers=4, balanced_layers=slice(2, 4))\n"
        f"fan = Path({str(folder)!r}) / 'fan'; fan.mkdir()\n"
        "m.make_rollouts(fan, num_siblings=9)\n"
        f"m.make_prompts(Path({str(folder)!r}))"
    )
    subprocess.run([sys.executable, "-c", code], env=slime_environment(folder), check=True)
    return folder


@pytest.fixture(scope="session")
def run_slime(inputs, tmp_path_factory):
    """Run MODULE (`train`, `app.slime_train`, ...) with slime's tiny arguments and more flags.

    num_engine_gpus: rollouts come from one stand-in engine of this size instead of the dumps.
    """
    from slime_on_cpu.make_inputs import arguments as tiny_arguments
    from slime_on_cpu.make_inputs import generated

    finished: dict[tuple, SlimeRun] = {}

    def run(
        module: str,
        *flags: str,
        num_gpus: int = 2,
        ep: int = 2,
        config: str | None = None,
        arguments: list[str] | None = None,
        num_engine_gpus: int = 0,
        colocate: bool = False,
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
            num_engine_gpus,
            colocate,
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
        rollouts = generated(inputs, num_engine_gpus) if num_engine_gpus else None
        environment |= {"ROUTEPACK_TEST_ROUTER": "1"} if num_engine_gpus else {}
        num_all = num_gpus + (0 if colocate else num_engine_gpus)
        command += arguments or tiny_arguments(inputs, num_gpus=num_gpus, ep=ep, rollouts=rollouts)
        command += more
        command = [part.replace("OUTPUT", str(folder)) for part in command]
        done = subprocess.run(
            command,
            env=slime_environment(folder, ROUTEPACK_TEST_GPUS=str(num_all), **environment),
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
