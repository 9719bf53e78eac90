"""Checkpoints in logical order: every expert goes home for a save and back afterwards.

Chosen over a translated `sharded_state_dict`: the optimizer's formats are flat shards of per-rank
buckets, which no renaming of expert ids reaches, and a checkpoint made this way is exactly what
plain Megatron would have written. It costs two commits a save. Where experts were is written beside
the checkpoint, so that a resumed run does not start from a cold plan.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
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
    must be finalized inside the block, or have copied what it writes.
    """
    before = committer.layout.placement()
    home = np.broadcast_to(np.arange(before.num_experts), before.expert_of_slot.shape)
    if (before.expert_of_slot == home).all():
        yield
        return
    identity = replace(before, expert_of_slot=home.astype(np.int32))
    _commit(committer, identity, "identity for a save")
    try:
        yield
    finally:
        _commit(committer, before, "back after a save")


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
    _commit(committer, saved, "resume")
    return True


def _commit(committer: Committer, placement: Placement, why: str) -> None:
    committer.commit(
        placement, base_version=committer.layout.version, window_id=placement.version, digest=why
    )
