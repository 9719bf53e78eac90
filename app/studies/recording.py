"""Open a source for study: its windows with the topology and the costs they are planned under."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from planner.cost import CostModel, Stage
from planner.move_cost import MoveCost
from planner.placement import Placement
from planner.recorded.flops import ModelShape, cost_from_shape, gqa_params
from planner.recorded.presets import preset
from planner.recorded.read import read
from planner.topology import Topology
from planner.window import Window

# From the model's public configuration; every second layer attends to 128 tokens, taken as full.
GPT_OSS_20B = ModelShape(
    num_layers=24,
    num_dense_layers=0,
    num_experts=32,
    top_k=4,
    hidden=2880,
    dense_ffn=0,
    expert_ffn=2880,
    vocab=201088,
    num_heads=64,
    head_dim=64,
    value_dim=64,
    attention_params=gqa_params(2880, 64, 8, 64),
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Recording:
    """Recorded windows of one model, and the job that would train on them."""

    name: str
    windows: Sequence[Window]
    topology: Topology
    cost: CostModel
    move: MoveCost

    def identity(self) -> Placement:
        """Where training starts: expert e in slot e of every layer."""
        first = self.windows[0]
        return Placement.identity(first.num_layers, first.num_experts, self.topology.num_ep_ranks)

    @property
    def is_aggregate(self) -> bool:
        """Whether the windows hold no trajectories, so that only placement can be studied."""
        return _is_aggregate(self.windows)

    @property
    def title(self) -> str:
        """One line that says what was read and for which job."""
        first, topology = self.windows[0], self.topology
        return (
            f"{self.name}: {len(self.windows)} windows, {first.num_trajectories} trajectories x "
            f"{first.num_layers} MoE layers x {first.num_experts} experts; DP "
            f"{topology.num_dp_slots}, EP {topology.num_ep_ranks}, EDP {topology.num_shards}, PP "
            f"{topology.pp}, C {topology.capacity}"
        )


def open_recording(
    source: str,
    *,
    dp: int | None = None,
    ep: int | None = None,
    edp: int | None = None,
    capacity: int | None = None,
    num_windows: int | None = None,
    num_trajectories: int | None = None,
    cost_file: str | None = None,
    pp: int | None = None,
    tp: int | None = None,
    cp: int | None = None,
    reading: dict[str, Any] | None = None,
) -> Recording:
    """Read a source; a preset brings topology and costs, which the arguments override.

    reading: further arguments of `planner.recorded.read`, for dumps that do not say them.
    Raises ValueError when a file leaves dp, ep, capacity or the costs open, or they do not fit.
    """
    is_preset = source.startswith(("synthetic:", "slime:"))
    if is_preset:
        if pp or tp or cp:
            raise ValueError(f"--pp, --tp, --cp: {source} has its own; leave them out")
        known = preset(source)
        topology = _overridden(known.topology, dp, ep, edp, capacity)
        cost = rescaled(known.cost, topology.capacity / known.topology.capacity)
    else:
        for name, value in (("--ep", ep), ("--dp", dp), ("--capacity", capacity)):
            if value is None and Path(source).exists():
                raise ValueError(
                    f"{name}: missing; {source} does not say for which job it is planned, give "
                    "--ep, --dp and --capacity"
                )
        topology = Topology.uniform(
            dp=dp or 1,
            ep=ep or 1,
            edp=edp or 1,
            capacity=capacity or 1,
            pp=pp or 1,
            tp=tp or 1,
            cp=cp or 1,
        )
        cost = CostModel()
    windows = read(
        source,
        num_windows=num_windows,
        num_trajectories=num_trajectories,
        pp=topology.pp,
        ranks_per_slot=topology.tp * topology.cp,
        **(reading or {}),
    )
    first = windows[0]
    if first.num_experts % topology.num_ep_ranks:
        raise ValueError(
            f"--ep: got {topology.num_ep_ranks}, which does not divide the {first.num_experts} "
            f"experts of {source}"
        )
    move = MoveCost()
    if cost_file is not None:
        cost, move = read_costs(cost_file)
    elif not is_preset and not _is_aggregate(windows):
        cost = _known_cost(source, first, topology)
    return Recording(name=source, windows=windows, topology=topology, cost=cost, move=move)


def _is_aggregate(windows: Sequence[Window]) -> bool:
    return all(w.num_trajectories == 1 and bool(w.estimated.all()) for w in windows)


def _overridden(
    known: Topology, dp: int | None, ep: int | None, edp: int | None, capacity: int | None
) -> Topology:
    if dp is None and ep is None and edp is None:
        return known if capacity is None else replace(known, capacity=capacity)
    return Topology.uniform(
        dp=dp or known.num_dp_slots,
        ep=ep or known.num_ep_ranks,
        edp=edp or (known.num_shards if dp is None else 1),
        capacity=capacity or known.capacity,
        pp=known.pp,
        vpp=known.vpp,
        microbatch_group=known.microbatch_group,
        tp=known.tp,
        cp=known.cp,
        ranks_per_node=known.ranks_per_node,
    )


def rescaled(cost: CostModel, ratio: float) -> CostModel:
    """The same costs at another cell capacity, `ratio` times the old: token pairs grow with it."""
    return CostModel(stages=tuple(replace(stage, beta=stage.beta * ratio) for stage in cost.stages))


def _known_cost(source: str, window: Window, topology: Topology) -> CostModel:
    known = GPT_OSS_20B
    if (window.num_layers, window.num_experts) == (known.num_moe_layers, known.num_experts):
        return cost_from_shape(known, topology.capacity, topology.tp, topology.cp)
    raise ValueError(
        f"{source}: no cost coefficients for {window.num_layers} MoE layers x "
        f"{window.num_experts} experts; known are the shape of GPT-OSS-20B and the presets; give "
        "--cost FILE with stages (name, alpha, beta)"
    )


def read_costs(path: str) -> tuple[CostModel, MoveCost]:
    """Read `stages:` (name, alpha, beta each) and an optional `move:` (fields of MoveCost).

    alpha and beta hold for the capacity in use (Equation 2), in units where C routed tokens on the
    busiest EP rank cost 1. Raises ValueError naming the file and the wrong entry.
    """
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path}: not a YAML file of costs ({reason})") from error
    if not isinstance(content, dict) or not isinstance(content.get("stages"), list):
        raise ValueError(f"{path}: expected `stages:`, a list of entries with name, alpha and beta")
    unknown = sorted(set(map(str, content)) - {"stages", "move"})
    if unknown:
        raise ValueError(f"{path}: unknown entry {unknown[0]!r}, expected stages and move")
    stages = tuple(_stage(path, entry) for entry in content["stages"])
    try:
        return CostModel(stages=stages), MoveCost(**_numbers(path, content.get("move") or {}))
    except TypeError as error:
        raise ValueError(f"{path}: move: {error}") from error


def _stage(path: str, entry: Any) -> Stage:
    if not isinstance(entry, dict) or not {"name", "alpha"} <= set(entry) <= {
        "name",
        "alpha",
        "beta",
    }:
        raise ValueError(f"{path}: stages: got {entry!r}, expected name, alpha and (or not) beta")
    numbers = _numbers(path, {name: entry[name] for name in entry if name != "name"})
    return Stage(name=str(entry["name"]), **numbers)


def _numbers(path: str, entry: Any) -> dict[str, float]:
    if not isinstance(entry, dict):
        raise ValueError(f"{path}: got {entry!r}, expected names with numbers")
    for name, value in entry.items():
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise ValueError(f"{path}: {name}: got {value!r}, expected a finite number")
    return {str(name): float(value) for name, value in entry.items()}
