"""A plan is plain data: the placement, the rows and a report; it is validated before it is run."""

from __future__ import annotations

import hashlib
import io
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from planner.placement import Placement
from planner.rows import Rows
from planner.topology import Topology
from planner.window import Window

FORMAT = 1


class PlanError(ValueError):
    """A plan that must not be executed."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """What training executes for one window, and the figures that describe it."""

    policy: str
    window_id: int
    layout_version: int
    """Version of the carried placement that the plan starts from."""
    placement: Placement
    rows: Rows
    report: dict[str, float] = field(default_factory=dict)
    """Plain figures; not part of the digest."""
    notes: dict[str, str] = field(default_factory=dict)
    """Words beside the figures, such as the stop reason of the placement; not in the digest."""

    def digest(self) -> str:
        """Hex SHA-256 over everything decisive: what all ranks must agree on."""
        header = [
            self.policy,
            self.window_id,
            self.layout_version,
            self.placement.version,
            self.placement.num_ep_ranks,
            list(self.placement.expert_of_slot.shape),
            self.rows.num_rows,
            self.rows.num_dp_slots,
            len(self.rows.cell),
        ]
        digest = hashlib.sha256(json.dumps(header).encode())
        digest.update(self.placement.expert_of_slot.astype("<i4").tobytes())
        digest.update(self.rows.cell.astype("<i4").tobytes())
        return digest.hexdigest()

    def to_bytes(self) -> bytes:
        """The plan as an npz archive without pickled objects."""
        header = {
            "format": FORMAT,
            "policy": self.policy,
            "window_id": self.window_id,
            "layout_version": self.layout_version,
            "placement_version": self.placement.version,
            "num_ep_ranks": self.placement.num_ep_ranks,
            "num_rows": self.rows.num_rows,
            "num_dp_slots": self.rows.num_dp_slots,
            "report": self.report,
            "notes": self.notes,
            "digest": self.digest(),
        }
        buffer = io.BytesIO()
        np.savez_compressed(
            buffer,
            header=np.frombuffer(json.dumps(header).encode(), np.uint8),
            expert_of_slot=self.placement.expert_of_slot,
            cell=self.rows.cell,
        )
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes, source: str = "plan") -> Plan:
        """Reads `to_bytes`. Raises ValueError naming `source` when the data is damaged."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as archive:
                header = json.loads(archive["header"].tobytes())
                if header["format"] != FORMAT:
                    raise ValueError(f"format {header['format']}, this version reads {FORMAT}")
                plan = cls(
                    policy=header["policy"],
                    window_id=header["window_id"],
                    layout_version=header["layout_version"],
                    placement=Placement(
                        expert_of_slot=archive["expert_of_slot"],
                        num_ep_ranks=header["num_ep_ranks"],
                        version=header["placement_version"],
                    ),
                    rows=Rows(
                        cell=archive["cell"],
                        num_rows=header["num_rows"],
                        num_dp_slots=header["num_dp_slots"],
                    ),
                    report=header["report"],
                    notes=header["notes"],
                )
            if plan.digest() != header["digest"]:
                raise ValueError("contents do not match the stored digest")
        except Exception as error:
            raise ValueError(
                f"{source}: not a readable RoutePack plan ({type(error).__name__}: {error}); "
                "write it again with `Plan.save`"
            ) from error
        return plan

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as npz; a reader never sees half a file."""
        target = Path(path)
        partial = target.with_name(target.name + ".partial")
        partial.write_bytes(self.to_bytes())
        os.replace(partial, target)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Reads a saved plan. Raises ValueError naming the file when it is damaged."""
        return cls.from_bytes(Path(path).read_bytes(), str(path))

    def validate(self, window: Window, topology: Topology, carried: Placement) -> None:
        """Raises PlanError unless the plan may be executed for this window from `carried`."""
        self._validate_identity(window, carried)
        self._validate_placement(window, topology, carried)
        self._validate_rows(window, topology)

    def _validate_identity(self, window: Window, carried: Placement) -> None:
        if self.window_id != window.window_id:
            raise PlanError(
                f"window_id: the plan is for window {self.window_id}, got window "
                f"{window.window_id}; plan this window"
            )
        if self.layout_version != carried.version:
            raise PlanError(
                f"layout_version: the plan starts from version {self.layout_version}, the carried "
                f"placement is version {carried.version}; plan again from the current placement"
            )

    def _validate_placement(self, window: Window, topology: Topology, carried: Placement) -> None:
        expected = (window.num_layers, window.num_experts)
        if self.placement.expert_of_slot.shape != expected:
            raise PlanError(
                f"placement: covers [layer, expert] {self.placement.expert_of_slot.shape}, the "
                f"window has {expected}"
            )
        if not (
            self.placement.num_ep_ranks == topology.num_ep_ranks == carried.num_ep_ranks
            and carried.expert_of_slot.shape == expected
        ):
            raise PlanError(
                f"num_ep_ranks: the plan has {self.placement.num_ep_ranks}, the carried placement "
                f"{carried.num_ep_ranks}, the topology {topology.num_ep_ranks}; they must agree"
            )
        moved = self.placement.num_moved(carried) > 0
        if self.placement.version != self.layout_version + moved:
            raise PlanError(
                f"placement.version: got {self.placement.version}, expected "
                f"{self.layout_version + moved} ({'experts move' if moved else 'nothing moves'})"
            )

    def _validate_rows(self, window: Window, topology: Topology) -> None:
        rows = self.rows
        if rows.num_dp_slots != topology.num_dp_slots:
            raise PlanError(
                f"num_dp_slots: the plan has {rows.num_dp_slots}, the topology "
                f"{topology.num_dp_slots}"
            )
        if len(rows.cell) != window.num_trajectories:
            raise PlanError(
                f"cell: the plan assigns {len(rows.cell)} trajectories, the window holds "
                f"{window.num_trajectories}"
            )
        if rows.num_rows % topology.row_multiple:
            raise PlanError(
                f"num_rows: got {rows.num_rows}, expected a multiple of {topology.row_multiple} "
                f"(vpp={topology.vpp})"
            )
        if int(self.report.get("dropped", 0)) != rows.num_dropped:
            raise PlanError(
                f"dropped: {rows.num_dropped} trajectories have no cell, the report counts "
                f"{int(self.report.get('dropped', 0))}"
            )
        count = np.bincount(rows.cell[rows.kept], minlength=rows.num_cells)
        tokens = rows.cell_tokens(window.length).ravel()
        for problem, wrong in (
            ("is empty", count == 0),
            (
                f"is above the cap of {topology.capacity}",
                (tokens > topology.capacity) & (count > 1),
            ),
        ):
            if wrong.any():
                k = int(np.flatnonzero(wrong)[0])
                row, slot = divmod(k, rows.num_dp_slots)
                raise PlanError(
                    f"cell: row {row}, DP slot {slot} {problem} ({count[k]} trajectories, "
                    f"{tokens[k]} tokens)"
                )
