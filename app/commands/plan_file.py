"""A plan file that can be drawn: the plan, and the modelled work of its cells beside it.

The file is `planner.plan.Plan`'s archive with further members, which `Plan.load` ignores.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from planner.cost import CostModel
from planner.placement import Placement, rank_load
from planner.plan import Plan
from planner.recorded.npz import DAMAGE
from planner.rows import Rows
from planner.score import rank_demand, row_costs
from planner.topology import Topology
from planner.window import Window

_MEMBERS = (
    "drawing_length",
    "drawing_cell_work",
    "drawing_dense",
    "drawing_expert",
    "drawing_load_before",
    "drawing_load_after",
    "drawing_job",
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Drawing:
    """What a picture of a plan needs beyond the plan."""

    length: np.ndarray
    """[trajectory] tokens."""
    cell_work: np.ndarray
    """[row, DP slot] modelled dense work of each cell."""
    dense: np.ndarray
    """[row, EDP shard] A_rg."""
    expert: np.ndarray
    """[row, EDP shard] E_rg."""
    load_before: np.ndarray
    """[layer, EP rank] routed tokens under the carried placement."""
    load_after: np.ndarray
    """[layer, EP rank] routed tokens under the plan's placement."""
    source: str
    capacity: int
    edp_shards: tuple[tuple[int, ...], ...]
    layer_numbers: tuple[int, ...]


def drawing_of(
    plan: Plan,
    window: Window,
    topology: Topology,
    cost: CostModel,
    carried: Placement,
    source: str,
) -> Drawing:
    """The drawing of a plan that fits the window and the topology."""
    q = rank_demand(window.demand, plan.placement)
    dense, expert = row_costs(window.length, q, plan.rows, topology, cost)
    return Drawing(
        length=window.length,
        cell_work=_cell_work(plan.rows, window, topology, cost),
        dense=dense,
        expert=expert,
        load_before=rank_load(window.expert_load, carried),
        load_after=rank_load(window.expert_load, plan.placement),
        source=source,
        capacity=topology.capacity,
        edp_shards=topology.edp_shards,
        layer_numbers=window.layer_numbers,
    )


def _cell_work(rows: Rows, window: Window, topology: Topology, cost: CostModel) -> np.ndarray:
    kept = rows.kept
    work = cost.dense_work(window.length[kept], topology.capacity)
    cells = np.bincount(rows.cell[kept], work, rows.num_cells)
    return cells.reshape(rows.num_rows, rows.num_dp_slots)


def save_plan_file(path: str | os.PathLike[str], plan: Plan, drawing: Drawing) -> None:
    """Write both, whole or not at all; raises ValueError for a name that does not end in .npz."""
    target = Path(path)
    if target.suffix != ".npz":
        raise ValueError(f"--output: got {target}, expected a name that ends in .npz")
    job = {
        "source": drawing.source,
        "capacity": drawing.capacity,
        "edp_shards": drawing.edp_shards,
        "layer_numbers": drawing.layer_numbers,
    }
    arrays = {
        "drawing_length": drawing.length,
        "drawing_cell_work": drawing.cell_work,
        "drawing_dense": drawing.dense,
        "drawing_expert": drawing.expert,
        "drawing_load_before": drawing.load_before,
        "drawing_load_after": drawing.load_after,
        "drawing_job": np.frombuffer(json.dumps(job).encode(), np.uint8),
    }
    archive = io.BytesIO(plan.to_bytes())
    with zipfile.ZipFile(archive, "a", zipfile.ZIP_DEFLATED) as members:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.save(member, array, allow_pickle=False)
            members.writestr(f"{name}.npy", member.getvalue())
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial.write_bytes(archive.getvalue())
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def load_plan_file(path: str | os.PathLike[str]) -> tuple[Plan, Drawing | None]:
    """Read a plan; the drawing is None for a file of `Plan.save`, as training writes it.

    Raises ValueError naming a file that is missing, damaged or foreign.
    """
    target = Path(path)
    if not target.is_file():
        raise ValueError(f"{target}: no such plan file; write one with `routepack plan`")
    plan = Plan.load(target)
    try:
        with np.load(target, allow_pickle=False) as archive:
            if not set(_MEMBERS) <= set(archive.files):
                return plan, None
            members = {name: archive[name] for name in _MEMBERS}
        job = json.loads(members["drawing_job"].tobytes())
        drawing = Drawing(
            length=members["drawing_length"],
            cell_work=members["drawing_cell_work"],
            dense=members["drawing_dense"],
            expert=members["drawing_expert"],
            load_before=members["drawing_load_before"],
            load_after=members["drawing_load_after"],
            source=str(job["source"]),
            capacity=int(job["capacity"]),
            edp_shards=tuple(tuple(map(int, shard)) for shard in job["edp_shards"]),
            layer_numbers=tuple(map(int, job["layer_numbers"])),
        )
        _check(plan, drawing)
    except DAMAGE as error:
        raise ValueError(f"{target}: the drawing beside the plan is damaged ({error})") from error
    return plan, drawing


def _check(plan: Plan, drawing: Drawing) -> None:
    rows = plan.rows
    expected = {
        "length": (drawing.length, (len(rows.cell),)),
        "cell_work": (drawing.cell_work, (rows.num_rows, rows.num_dp_slots)),
        "dense": (drawing.dense, (rows.num_rows, len(drawing.edp_shards))),
        "expert": (drawing.expert, (rows.num_rows, len(drawing.edp_shards))),
    }
    for name, (array, shape) in expected.items():
        if array.shape != shape or not np.isfinite(array).all():
            raise ValueError(f"{name} has shape {array.shape}, the plan needs {shape}")
