"""A rank killed before, in or after a commit: a clear end, and a restart that loses nothing."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace

import psutil
import pytest
from app_ranks.dying_rank import KILLED_WINDOW, PlaceThenDie
from tiny import tiny_config

from app.commands.train import train
from app.local.ranks import RankFailure
from rollout_hooks.admission import PlannerCalls

pytestmark = pytest.mark.ranks
POLICY = "reroute"


def checkpointing_config():
    config = tiny_config()
    return replace(config, train=replace(config.train, num_windows=3, save_every=KILLED_WINDOW))


def windows(folder) -> dict[int, tuple[float, ...]]:
    lines = (folder / f"metrics-{POLICY}.jsonl").read_text().splitlines()
    names = ("loss", "reward", "grad_norm", "place/moved_experts")
    return {m["rollout/step"]: tuple(m[n] for n in names) for m in map(json.loads, lines)}


def orphans(within_seconds: float) -> list[str]:
    """Processes of this test that nobody waits for and that do not end in time."""
    deadline = time.monotonic() + within_seconds
    while True:
        ours = {os.getpid(), *(p.pid for p in psutil.Process().children(recursive=True))}
        left = [p for p in psutil.process_iter() if p.pid not in ours and _is_of_this_test(p)]
        if not left or time.monotonic() > deadline:
            return [" ".join(p.cmdline()) for p in left]
        time.sleep(0.5)


def _is_of_this_test(process: psutil.Process) -> bool:
    try:
        name = process.environ().get("PYTEST_CURRENT_TEST", "").split(" ")[0]
    except psutil.Error:
        return False
    return name == os.environ["PYTEST_CURRENT_TEST"].split(" ")[0]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train(checkpointing_config(), POLICY, folder / "run")
        yield windows(folder / "run")


@pytest.mark.parametrize("when", ["before", "in", "after"])
def test_a_restart_continues_as_an_undisturbed_run(when, undisturbed, tmp_path):
    config = checkpointing_config()
    with pytest.raises(RankFailure, match="rank 0 of 2 was ended by SIGKILL; all ranks were stop"):
        train(config, POLICY, tmp_path / "killed", calls=PlannerCalls(place=PlaceThenDie(when)))
    assert orphans(within_seconds=20) == []
    last = tmp_path / "killed" / f"checkpoint-{POLICY}-{KILLED_WINDOW}"
    train(config, POLICY, tmp_path / "restarted", resume=str(last))
    assert windows(tmp_path / "restarted") == {KILLED_WINDOW: undisturbed[KILLED_WINDOW]}
