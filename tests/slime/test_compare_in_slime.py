"""launch/grpo_ling.sh --compare, the script itself, on a tiny Ling's dump in real slime.

Only `ray` is a stand-in: it runs a submitted job here, on the CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from tests_of_slime import EXTRA, HERE, ROOT, slime_environment

from planner.policies import POLICIES

pytestmark = pytest.mark.slime
RAY = """#!/usr/bin/env bash
# `ray job list` finds a running Ray; `ray job submit ... -- python3 -m MODULE FLAGS` runs the job.
[ "$2" = list ] && exit 0
while [ "$1" != -- ]; do shift; done
shift 3
exec {python} -m slime_on_cpu.run_driver "$@"
"""
FLAGS = """
--rollout-num-gpus 0 --disable-rollout-global-dataset --data-pad-size-multiplier 16
--spec slime_on_cpu.layer_spec get_spec --transformer-impl local --distributed-backend gloo
--no-rope-fusion --no-gradient-accumulation-fusion --no-masked-softmax-fusion
--no-persist-layer-norm --no-bias-swiglu-fusion --no-bias-dropout-fusion
--make-vocab-size-divisible-by 1 --clip-grad 0
"""
MEASURED = tuple(POLICIES)[1:]


def test_every_policy_and_the_ideal_replay_one_dump(inputs, tmp_path):
    """`inputs` is asked for, since it makes slime importable on the CPU first."""
    make = (
        "from slime_on_cpu.install import install; install()\n"
        "from pathlib import Path\n"
        "from slime_on_cpu import ling, make_inputs\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "ling.make_checkpoint(folder / 'ling'); (folder / 'dump').mkdir()\n"
        "make_inputs.make_rollouts("
        "folder / 'dump', num_rollouts=3, num_layers=3, num_experts=16, top_k=4)"
    )
    environment = slime_environment(tmp_path, ROUTEPACK_TEST_GPUS="2")
    subprocess.run([sys.executable, "-c", make], env=environment, check=True)
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "ray").write_text(RAY.format(python=sys.executable))
    (tools / "ray").chmod(0o755)
    (tmp_path / "routepack.yaml").write_text(
        "planner: {stop: cv, budget_seconds: 0.2, num_cores: 1}\n"
    )
    output = tmp_path / "compare"
    slime, megatron = EXTRA[:2] if len(EXTRA) > 1 else (str(HERE), str(HERE))
    done = subprocess.run(
        ["bash", str(ROOT / "launch" / "grpo_ling.sh"), "--compare", str(tmp_path / "dump")],
        env={
            **environment,
            "PATH": f"{tools}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
            "MODEL_DIR": str(tmp_path / "ling"),
            "SAVE_DIR": str(tmp_path / "ling"),
            "SLIME_DIR": slime,
            "MEGATRON_DIR": megatron,
            "ROUTEPACK_CONFIG": str(tmp_path / "routepack.yaml"),
            "OUTPUT": str(output),
            "GPUS_PER_NODE": "2",
            "EP": "2",
            "COLOCATE": "0",
            "OPTIMIZER_OFFLOAD": "0",
            "DISPATCHER": "alltoall",
            "ROLLOUT_BATCH_SIZE": "4",
            "SAMPLES_PER_PROMPT": "4",
            "GLOBAL_BATCH_SIZE": "8",
            "MAX_TOKENS_PER_GPU": "128",
            "EXTRA_ARGS": " ".join(FLAGS.split()),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1500,
    )
    (tmp_path / "log.txt").write_text(done.stdout)
    print(done.stdout[-1500:])
    assert done.returncode == 0, done.stdout[-6000:]
    assert done.stdout.count("DRIVER_DONE") == len(MEASURED) + 1
    figures = json.loads((output / "compare.json").read_text())["figures"]
    for name in (*MEASURED, "ideal"):
        assert figures[f"cluster.tps_{name}_over_off.median"] > 0
    for policy in MEASURED:
        lines = (output / policy / f"metrics-{policy}.jsonl").read_text().splitlines()
        moved = sum(json.loads(line)["place/moved_experts"] for line in lines)
        assert len(lines) == 3 and (moved > 0) == (policy in ("reroute", "full"))
