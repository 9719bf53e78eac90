"""launch/grpo_*.sh by --dry-run and shellcheck: no GPU, no slime, no Ray."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from planner.policies import POLICIES

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "launch").glob("grpo_*.sh"))


def dry_run(script: Path, *options: str, check: bool = True, **environment: str):
    done = subprocess.run(
        ["bash", str(script), "--dry-run", *options],
        env={**os.environ, "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
    )
    if check:
        assert done.returncode == 0, done.stderr
    return done


def jobs(output: str) -> list[list[str]]:
    lines = [line for line in output.splitlines() if line.startswith("ray job submit")]
    return [shlex.split(line) for line in lines]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_scripts_are_clean_for_shellcheck():
    files = [*SCRIPTS, ROOT / "launch" / "slime_job.sh"]
    done = subprocess.run(
        ["shellcheck", "-x", *(str(f.relative_to(ROOT)) for f in files)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.stem)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_dry_run_prints_every_process_with_its_full_command(script, policy):
    done = dry_run(script, POLICY=policy)
    assert done.stdout.startswith("ray start --head")
    (job,) = jobs(done.stdout)
    flags = job[job.index("--") + 1 :]
    assert flags[:3] == ["python3", "-m", "app.slime_train"]
    assert flags[flags.index("--routepack-policy") + 1] == policy
    assert "--use-rollout-routing-replay" in flags and "--colocate" in flags
    assert "checked" in done.stdout  # or: not checked, with the reason


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.stem)
def test_variables_reach_the_command(script):
    done = dry_run(
        script,
        NUM_NODES="2",
        TP="2",
        EP="16",
        CONTEXT="4096",
        WANDB_PROJECT="p",
        WANDB_GROUP="g",
        ASYNC="1",
        EXTRA_ARGS="--seed 7",
    )
    (job,) = jobs(done.stdout)
    value = dict(pairwise(job))
    assert "app.slime_train_async" in job and "--colocate" not in job
    assert value["--actor-num-nodes"] == "2" and value["--expert-model-parallel-size"] == "16"
    assert value["--rollout-max-response-len"] == "4096" and value["--wandb-project"] == "p"
    assert job[-2:] == ["--seed", "7"]
    assert "ray start --address=" in done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.stem)
def test_compare_replays_one_dump_under_every_policy_and_the_ideal(script, tmp_path):
    for i in range(3):
        (tmp_path / f"rollout_{i}.pt").touch()
    done = dry_run(script, "--compare", str(tmp_path))
    found = jobs(done.stdout)
    policies = [dict(pairwise(job))["--routepack-policy"] for job in found]
    assert policies == ["observe", "base", "reschedule", "reroute", "full", "observe"]
    for job in found:
        value = dict(pairwise(job))
        assert value["--num-rollout"] == "3" and "--debug-train-only" in job
        assert value["--load-debug-rollout-data"] == f"{tmp_path}/rollout_{{rollout_id}}.pt"
    assert "--moe-router-force-load-balancing" in found[-1]
    assert "--use-rollout-routing-replay" not in found[-1]


def test_the_dispatcher_flags_have_the_form_of_the_installed_megatron(tmp_path):
    config = tmp_path / "megatron" / "core" / "transformer" / "transformer_config.py"
    config.parent.mkdir(parents=True)
    for text, expected in (
        ("moe_flex_dispatcher_backend: str", "--moe-flex-dispatcher-backend"),
        ("moe_enable_deepep: bool", "--moe-enable-deepep"),
        ("nothing of the kind", None),
    ):
        config.write_text(text)
        done = dry_run(SCRIPTS[0], DISPATCHER="deepep", MEGATRON_DIR=str(tmp_path))
        (job,) = jobs(done.stdout)
        kind = dict(pairwise(job))["--moe-token-dispatcher-type"]
        assert kind == ("alltoall" if expected is None else "flex")
        assert expected is None or expected in job


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.stem)
def test_no_script_ends_processes(script):
    for path in (script, ROOT / "launch" / "slime_job.sh"):
        words = path.read_text().replace("'ray stop' ends every Ray process", "")
        assert not any(word in words for word in ("pkill", "killall", "kill -9", "ray stop"))


@pytest.mark.parametrize(
    ("environment", "word"),
    [
        ({"POLICY": "best"}, "POLICY=best"),
        ({"MODEL": "ling-9"}, "MODEL=ling-9"),
        ({"DISPATCHER": "nccl"}, "DISPATCHER=nccl"),
    ],
)
def test_a_wrong_value_is_refused_with_what_to_change(environment, word):
    script = next(s for s in SCRIPTS if "ling" in s.name)
    done = dry_run(script, check=False, **environment)
    assert done.returncode == 2 and word in done.stderr and "expected" in done.stderr


def test_the_comparison_reads_the_runs_and_pairs_them_by_rollout(tmp_path):
    import json

    from app.slime.compare_runs import compare_runs

    for name, tps in dict(observe=100.0, full=110.0, ideal=120.0).items():
        folder = tmp_path / name
        folder.mkdir()
        lines = [
            json.dumps({"rollout/step": s, "tps": tps, "window_seconds": 10.0}) for s in range(4)
        ]
        (folder / f"metrics-{name}.jsonl").write_text("\n".join(lines))
    figures, skipped, rows = compare_runs(tmp_path)
    assert figures["cluster.tps_full_over_off.median"] == pytest.approx(1.1)
    assert figures["cluster.headroom_share.full"] == pytest.approx(0.5)
    assert "cluster.tps_base_over_off" in skipped and len(rows) == 3
