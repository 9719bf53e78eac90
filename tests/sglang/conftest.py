"""Real SGLang servers on the CPU: one per model family, started at most once in all tests."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from served import Served, qwen3_moe
from tiny import tiny_config

from app.local.model import build_hf
from app.local.rollout import capture_spec
from app.local.sglang_engine import save_checkpoint, start_sglang
from app.sglang_cpu.server import serve, sglang_python

ROOT = Path(__file__).resolve().parents[2]
CONTEXT_LENGTH = 288
CHUNKED_PREFILL = ("--chunked-prefill-size", "32")


@pytest.fixture(scope="session")
def sglang_environment() -> None:
    """Make the environment where it is missing; skip with the reason where that fails."""
    try:
        sglang_python()
    except FileNotFoundError:
        script = ["bash", str(ROOT / "launch" / "sglang_venv.sh")]
        made = subprocess.run(script, capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"launch/sglang_venv.sh failed: {made.stderr[-500:]}")


@pytest.fixture(scope="session")
def run_config():
    """The tiny GLM-4-MoE run that the first server serves; long responses are allowed."""
    config = tiny_config()
    rollout = replace(config.rollout, max_new_tokens=CONTEXT_LENGTH - 32)
    return replace(config, rollout=rollout)


@pytest.fixture(scope="session")
def glm4_moe(sglang_environment, run_config, tmp_path_factory) -> Iterator[Served]:
    """Glm4Moe (layer 0 dense, group-limited sigmoid router), started as a run starts it."""
    from safetensors.torch import save_file

    hf = build_hf(run_config.model, run_config.routing_skew, run_config.seed)
    weights = tmp_path_factory.mktemp("weights") / "start.safetensors"
    save_file(hf.state_dict(), weights)
    with start_sglang(run_config, weights, extra=CHUNKED_PREFILL) as url:
        yield Served(url=url, hf=hf, spec=capture_spec(run_config.model))


@pytest.fixture(scope="session")
def qwen3(sglang_environment, tmp_path_factory) -> Iterator[Served]:
    """Qwen3-MoE (softmax router, no dense layer)."""
    hf, spec = qwen3_moe()
    folder = tmp_path_factory.mktemp("qwen3_moe")
    save_checkpoint(hf, folder)
    with serve(
        folder, context_length=CONTEXT_LENGTH, max_total_tokens=8192, extra=CHUNKED_PREFILL
    ) as url:
        yield Served(url=url, hf=hf, spec=spec)


@pytest.fixture(params=["glm4_moe", "qwen3"])
def served(request) -> Served:
    """Each served model in turn."""
    return request.getfixturevalue(request.param)
