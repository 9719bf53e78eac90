"""The expert layout beside a checkpoint, so that a resumed run does not start from a cold plan.

Checkpoints are written in logical order (identity restored around a save), so they load without
RoutePack. `routepack_layout.npz` beside them only says where experts were.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np

from planner.placement import Placement

logger = logging.getLogger(__name__)
FILE = "routepack_layout.npz"


def save_layout(folder: str | os.PathLike[str], placement: Placement) -> None:
    """Write `placement` (all MoE layers) into a checkpoint folder, whole or not at all."""
    target = Path(folder) / FILE
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial.npz")
    np.savez_compressed(
        partial,
        expert_of_slot=placement.expert_of_slot,
        header=np.array([placement.num_ep_ranks, placement.version]),
    )
    os.replace(partial, target)


def load_layout(folder: str | os.PathLike[str] | None) -> Placement | None:
    """The placement saved in a checkpoint folder; None, with a warning if damaged, without one."""
    path = None if folder is None else Path(folder) / FILE
    if path is None or not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as archive:
            num_ep_ranks, version = (int(x) for x in archive["header"])
            return Placement(
                expert_of_slot=archive["expert_of_slot"],
                num_ep_ranks=num_ep_ranks,
                version=version,
            )
    except Exception as error:
        logger.warning("%s is damaged (%s): planning starts from identity", path, error)
        return None
