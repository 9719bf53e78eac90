"""Checkpoints in logical order: every expert goes home for a save and back afterwards.

Chosen over a translated `sharded_state_dict`: the optimizer's formats are flat shards of per-rank
buckets, which no renaming of expert ids reaches, and a checkpoint made this way is exactly what
plain Megatron would have written. It costs two commits a save, one if the save is asynchronous.
Where experts were is written beside the checkpoint, so that a resumed run starts from no cold plan.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from planner.placement import Placement
from train_hooks.commit import Committer
from train_hooks.layout import LayoutError

LAYOUT_FILE = "routepack_layout.json"


@contextmanager
def logical_order(committer: Committer) -> Iterator[None]:
    """Hold the layout at identity inside the block, and bring it back after, error or not.

    Collective over the expert group; call between `optimizer.step()` and the next forward. The
    layout keeps its version: plans chain from it as if nothing had happened. An asynchronous save
    belongs to `stay_in_logical_order`.
    """
    before = committer.layout.placement()
    committer.move_to(_home(before), "identity for a save")
    try:
        yield
    finally:
        committer.move_to(before, "back after a save")


def stay_in_logical_order(committer: Committer, finalize: Callable[[], None]) -> None:
    """Go to identity for an asynchronous save that is about to start, and stay there.

    The next move, or `committer.settle()` at the end of a run, first calls `finalize`, which waits
    until the files are written: no byte moves while a writer may still read it. That next move
    goes from identity straight to the next plan, which still chains from `committer.carried()`.
    """
    committer.settle()
    before = committer.carried()
    committer.move_to(_home(before), "identity for a save")
    committer.before_next_move, committer.away_from = finalize, before


def _home(placement: Placement) -> Placement:
    experts = np.tile(np.arange(placement.num_experts, dtype=np.int32), (placement.num_layers, 1))
    return replace(placement, expert_of_slot=experts)


def save_layout(folder: str | os.PathLike[str], placement: Placement) -> None:
    """Write `placement` beside a checkpoint, whole or not at all; call on one rank of a stage."""
    target = Path(folder) / LAYOUT_FILE
    partial = target.with_suffix(".partial")
    content = {
        "num_ep_ranks": placement.num_ep_ranks,
        "version": placement.version,
        "expert_of_slot": placement.expert_of_slot.tolist(),
    }
    partial.write_text(json.dumps(content))
    os.replace(partial, target)


def load_layout(folder: str | os.PathLike[str]) -> Placement | None:
    """The placement beside a checkpoint, or None for one made without RoutePack.

    Raises LayoutError naming a damaged file: delete it to start from identity.
    """
    path = Path(folder) / LAYOUT_FILE
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
        return Placement(
            expert_of_slot=np.array(content["expert_of_slot"], np.int32),
            num_ep_ranks=int(content["num_ep_ranks"]),
            version=int(content["version"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LayoutError(
            f"{path} is damaged ({error}): delete it to resume with identity placement"
        ) from None


def resume_layout(committer: Committer, saved: Placement | None) -> bool:
    """Move experts to where they were when a checkpoint was written; returns whether it was done.

    Another number of EP ranks or other sizes keep identity: the placement was made for other ranks.
    Collective over the expert group; call after loading, before the first forward.
    """
    if saved is None or committer.layout.misfit(saved) is not None:
        return False
    committer.move_to(saved, "resume")
    return True
