"""A rank that dies ends the job clearly and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import yaml
from paths import ROOT

pytestmark = pytest.mark.ranks

RUN = {
    "name": "killed",
    "model": {"hidden_size": 32, "head_dim": 16, "ffn_hidden_size": 64, "moe_ffn_hidden_size": 24},
    "tasks": {"length_median": 8.0, "length_max": 24},
    "rollout": {"num_groups": 4, "group_size": 4, "max_new_tokens": 24},
    "planner": {"capacity": 96, "budget_seconds": 0.02},
    "warmup": {"num_steps": 0},
    "wandb": {"mode": "disabled"},
}


def start_training(folder):
    (folder / "run.yaml").write_text(yaml.safe_dump(RUN))
    command = [sys.executable, "-m", "app.cli", "train", "--config", "run.yaml"]
    command += ["--policy", "full", "--windows", "2000", "--output", "out"]
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def is_fork_server(process: psutil.Process) -> bool:
    """Whether ranks are forked from it (app/local/ranks.py)."""
    return "forkserver" in " ".join(process.cmdline())


def training_ranks(job, folder) -> list[psutil.Process]:
    """The two rank processes, once those of training (after the warm-up's) compute."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert job.poll() is None, job.stdout.read()
        servers = [p for p in psutil.Process(job.pid).children() if is_fork_server(p)]
        ranks = [rank for server in servers for rank in server.children()]
        warm = list((folder / "runs" / "warmup").glob("*.safetensors"))
        if warm and len(ranks) == 2 and all(p.cpu_times().user > 2 for p in ranks):
            return ranks
        time.sleep(0.5)
    raise AssertionError("the ranks did not start training")


def wait_until_gone(processes, seconds: float) -> list[psutil.Process]:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return alive


def test_where_cuda_is_real_the_server_of_ranks_stays_up_and_a_rank_says_what_to_set():
    code = (
        "import torch; torch.cuda.is_available = lambda: True; import app.local.preload\n"
        "try:\n    import app.local.cpu_megatron\nexcept RuntimeError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "CUDA_VISIBLE_DEVICES=" in done.stdout


def test_killing_a_rank_ends_the_job_clearly_and_without_orphans(tmp_path):
    job = start_training(tmp_path)
    ranks = training_ranks(job, tmp_path)
    everyone = psutil.Process(job.pid).children(recursive=True)
    os.kill(ranks[1].pid, signal.SIGKILL)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 1
    assert "of 2 was ended by SIGKILL; all ranks were stopped" in output
    assert "Traceback" not in output
    assert wait_until_gone(everyone, 10) == []


def test_killing_the_command_leaves_no_orphan(tmp_path):
    job = start_training(tmp_path)
    training_ranks(job, tmp_path)
    everyone = psutil.Process(job.pid).children(recursive=True)
    job.kill()
    job.wait()
    assert wait_until_gone(everyone, 30) == []
