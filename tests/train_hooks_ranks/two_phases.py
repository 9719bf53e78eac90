"""What the rank processes of test_two_phases.py do: watch a commit, and let it fail."""

from __future__ import annotations

import app.local.cpu_megatron  # isort: skip  # noqa: F401  before megatron

import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

from app.local.policy_equivalence import random_placement
from app.matrix.layouts import StateLayout
from app.matrix.prove import initialize_parallel
from app.matrix.trainer import MatrixTrainer
from train_hooks import transport
from train_hooks.commit import CommitOptions
from train_hooks.layout import ExpertLayout
from train_hooks.prepare import prepare
from train_hooks.staging import Staging
from train_hooks.state_by_expert import num_different, state_by_expert

OURS = str(Path(transport.__file__).parent)
SHAPE = StateLayout(name="two phases", bf16=True, staging_mb=1 / 64)


def begun(shape: StateLayout = SHAPE) -> MatrixTrainer:
    initialize_parallel(shape)
    trainer = MatrixTrainer(shape)
    trainer.step(0)
    return trainer


def another(trainer: MatrixTrainer, seed: int):
    return random_placement(trainer.layout.placement(), seed)


def what_executing_calls(config) -> dict[str, int]:
    """Calls between `begin_change` and the end of `finish_change`, our files by function.

    Python functions outside our files and torch's are named by file; C functions by name.
    """
    trainer = begun()
    trainer.committer.options = CommitOptions(staging_mb=1 / 64)
    trainer.committer.staging = Staging(20_000, torch.device("cpu"), on_host=lambda t: True)
    calls: Counter = Counter()
    watching = False

    def watch(frame, event, argument):
        nonlocal watching
        code = frame.f_code
        if event == "call" and code is ExpertLayout.begin_change.__code__:
            watching = True
        if watching and event == "call":
            path = code.co_filename
            if path.startswith(OURS):
                calls[f"{Path(path).stem}.{code.co_qualname}"] += 1
            elif "/torch/" in path:
                calls["torch"] += 1
            else:
                calls[f"{path}: {code.co_qualname}"] += 1
        if watching and event == "c_call" and frame.f_code.co_filename.startswith(OURS):
            calls[f"C {argument.__qualname__}"] += 1
        if event == "return" and code is ExpertLayout.finish_change.__code__:
            watching = False

    target = another(trainer, 1)
    sys.setprofile(watch)
    trainer.committer.move_to(target, "watched")
    sys.setprofile(None)
    return dict(calls)


def failures_while_preparing(config) -> dict:
    """Let rank 1 run out of memory on entry of each function that preparing calls, one at a time.

    Returns by function what every rank said and whether anything moved, and how training went on.
    """
    trainer, alone = begun(), begun()
    trainer.committer.options = CommitOptions(staging_mb=1 / 64, verify="full")
    before = state_by_expert(trainer.layout, trainer.state)
    functions = _functions_of_a_preparation(trainer)
    everywhere: list = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, sorted(functions))
    names = everywhere[1]
    said = {}
    for number, name in enumerate(names):
        placement = another(trainer, 100 + number)
        trainer.committer.staging.release()
        trainer.committer.views._known.clear()
        trainer.state._shards.clear()
        trainer.state._owners.clear()
        error = ""
        if dist.get_rank() == 1:
            sys.setprofile(_OutOfMemory(name))
        try:
            trainer.committer.move_to(placement, f"fails in {name}")
        except RuntimeError as raised:
            error = str(raised)
        finally:
            sys.setprofile(None)
        dist.all_gather_object(everywhere, error)
        moved = num_different(before, state_by_expert(trainer.layout, trainer.state))
        said[name] = (list(everywhere), moved)
    loss_difference = abs(trainer.step(5) - alone.step(5))
    trainer.committer.move_to(another(trainer, 9), "works at last")
    loss_difference += abs(trainer.step(6) - alone.step(6))
    return {"said": said, "loss_difference": loss_difference}


def _name(code) -> str:
    return f"{Path(code.co_filename).stem}.{code.co_qualname}"


def _functions_of_a_preparation(trainer: MatrixTrainer) -> set[str]:
    """Every function of ours that a preparation without cached lookups enters."""
    found: set[str] = set()
    inside = 0

    def watch(frame, event, argument):
        nonlocal inside
        code = frame.f_code
        if event == "call" and inside and code.co_filename.startswith(OURS):
            found.add(_name(code))
        if code is prepare.__code__:
            inside += (event == "call") - (event == "return")

    trainer.committer.views._known.clear()
    trainer.state._shards.clear()
    trainer.state._owners.clear()
    sys.setprofile(watch)
    trainer.committer.move_to(another(trainer, 1), "listed")
    sys.setprofile(None)
    trainer.committer.move_to(another(trainer, 2), "no step between")
    return {name for name in found if not name.startswith("agreement.")}


class _OutOfMemory:
    """Raises MemoryError on the first entry of one function while a commit is prepared."""

    def __init__(self, name: str):
        self.name = name
        self.inside = 0

    def __call__(self, frame, event, argument):
        code = frame.f_code
        if event == "call" and self.inside and _name(code) == self.name:
            sys.setprofile(None)
            raise MemoryError(f"no memory left in {self.name}")
        if code is prepare.__code__:
            self.inside += (event == "call") - (event == "return")


def interrupted(config) -> dict[str, str]:
    """Ctrl-C in the middle of carrying: what the commit raised, and what the next forward says."""
    trainer = begun()
    trainer.committer.options = CommitOptions(staging_mb=1 / 64, restart_from="/checkpoints/7")
    wait, calls = transport._wait, 0

    def stopped(works):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        wait(works)

    transport._wait = stopped
    raised = ""
    try:
        trainer.committer.move_to(another(trainer, 1), "interrupted")
    except BaseException as error:
        raised = type(error).__name__
    forward = ""
    try:
        trainer.step(1)
    except RuntimeError as error:
        forward = str(error)
    return {"raised": raised, "forward": forward}


def parameter_gathers(config) -> dict[str, int]:
    """Parameter gathers that a commit starts: after a step, and once more without one."""
    trainer = begun(StateLayout(name="gathers", bf16=True, bucket_size=8000,
                                overlap_grad_reduce=True, overlap_param_gather=True))  # fmt: skip
    groups = [g for c in trainer.chunks for g in c.expert_parallel_bucket_groups]
    dense = [g for c in trainer.chunks for g in c.bucket_groups]
    started: Counter = Counter()
    for kind, some in (("expert", groups), ("dense", dense)):
        for group in some:

            def counting(*a, kind=kind, original=group.start_param_sync, **k):
                started[kind] += 1
                return original(*a, **k)

            group.start_param_sync = counting
    result = {"expert groups": len(groups)}
    for name, seed in (("after a step", 1), ("without one", 2)):
        started.clear()
        trainer.committer.move_to(another(trainer, seed), name)
        result |= {f"expert, {name}": started["expert"], f"dense, {name}": started["dense"]}
    return result


def host_bytes(config) -> dict[str, tuple[int, int]]:
    """(bytes over the host link, bytes needed) of swapping two experts, by how they lie."""
    trainer = begun(StateLayout(name="host bytes"))
    found = {}
    for name, on_host, pinned in (
        ("device", False, False), ("pinned", True, True), ("pageable", True, False),
    ):  # fmt: skip
        trainer.committer.staging = Staging(
            2**20, torch.device("cpu"),
            on_host=lambda t, answer=on_host: answer, pinned=lambda t, answer=pinned: answer,
        )  # fmt: skip
        expert_of_slot = trainer.layout.placement().expert_of_slot.copy()
        expert_of_slot[0, [0, 11]] = expert_of_slot[0, [11, 0]]
        swapped = type(trainer.layout.placement())(
            expert_of_slot=expert_of_slot, num_ep_ranks=2, version=trainer.layout.version
        )
        trainer.committer.move_to(swapped, name)
        traffic = trainer.committer.traffic
        found[name] = (traffic.host, traffic.host_needed, traffic.copied, traffic.moved)
    return found
