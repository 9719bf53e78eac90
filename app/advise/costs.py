"""Costs of the advised job: coefficients at its TP, CP and capacity, seconds, bytes of a move."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from app.advise.job import JobSize
from app.studies.recording import GPT_OSS_20B, read_costs
from planner.cost import CostModel
from planner.move_cost import MoveCost
from planner.recorded.flops import cost_from_shape
from planner.recorded.presets import PRESET_NAMES, preset
from planner.window import Window

FLOPS_PER_SECOND = 400e12
"""Assumed useful bf16 rate of one GPU (40% of an H100's or H200's dense peak)."""
BYTES_PER_SECOND = 25e9
"""Assumed rate at which one EP rank sends expert state."""
BYTES_PER_WEIGHT = 14
"""bf16 weight, fp32 main shard and two fp32 Adam moments."""
EXPERT_SIZES = {
    "slime:qwen3-30b": (2048, 768),
    "slime:qwen3-235b": (4096, 1536),
    "slime:glm4.7-355b": (5120, 1536),
    "slime:glm5.2": (6144, 2048),
    "slime:glm5": (6144, 2048),
    "slime:minimax-m2": (3072, 1536),
    "GPT-OSS-20B": (2880, 2880),
}
"""Hidden size and expert width by model, as in planner/recorded/presets.py."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobCosts:
    """Coefficients at one size, the model's name, and seconds and bytes where they are known.

    from_file: the parts of `move:` that a cost file gave.
    """

    model: str
    cost: CostModel
    size: JobSize
    from_file: MoveCost | None = None

    def at(self, size: JobSize) -> CostModel:
        """The coefficients at other sizes: TP x CP ranks share a slot's work, pairs grow with C."""
        shared = self.size.ranks_of_slot / size.ranks_of_slot
        longer = size.capacity / self.size.capacity
        stages = (
            replace(s, alpha=s.alpha * shared, beta=s.beta * shared * longer)
            for s in self.cost.stages
        )
        return CostModel(stages=tuple(stages))

    def seconds_per_cost(self) -> float | None:
        """Seconds of one unit of cost: from the file, else from FLOPs; None if neither is known."""
        if self.from_file is not None and self.from_file.seconds_per_cost != 1.0:
            return self.from_file.seconds_per_cost
        if self.model not in EXPERT_SIZES:
            return None
        hidden, width = EXPERT_SIZES[self.model]
        return 18.0 * hidden * width * self.size.capacity / FLOPS_PER_SECOND

    def bytes_per_expert(self) -> float | None:
        """Bytes that move with one expert of one layer; None if the model is not known."""
        if self.from_file is not None and self.from_file.bytes_per_expert:
            return self.from_file.bytes_per_expert
        if self.model not in EXPERT_SIZES:
            return None
        hidden, width = EXPERT_SIZES[self.model]
        return 3.0 * hidden * width * BYTES_PER_WEIGHT

    def move(self, seconds_per_cost: float | None) -> MoveCost | None:
        """What a move costs; None unless both its bytes and the worth of balance are known."""
        moved = self.bytes_per_expert()
        if moved is None or seconds_per_cost is None:
            return None
        known = self.from_file or MoveCost()
        rate = 1.0 / (BYTES_PER_SECOND * self.size.ep * self.size.pp)  # stages move at once
        return MoveCost(
            bytes_per_expert=moved,
            seconds_per_byte=known.seconds_per_byte or rate,
            seconds_per_remote_byte=known.seconds_per_remote_byte or known.seconds_per_byte or rate,
            seconds_per_remote_token=known.seconds_per_remote_token,
            seconds_per_cost=seconds_per_cost,
        )


def job_costs(source: str, cost: str | None, window: Window, size: JobSize) -> JobCosts:
    """Costs of a source: of `--cost` (a YAML or a preset), else of the model that has its shape.

    Raises ValueError when no known model has the window's layers and experts, or several have.
    """
    if cost is not None and cost not in PRESET_NAMES and Path(cost).suffix in (".yaml", ".yml"):
        stages, move = read_costs(cost)
        return JobCosts(model=cost, cost=stages, size=size, from_file=move)
    if cost is not None:
        return _of_preset(cost, size)
    if source in PRESET_NAMES:
        return _of_preset(source, size)
    shape = (window.num_layers, window.num_experts)
    if shape == (GPT_OSS_20B.num_moe_layers, GPT_OSS_20B.num_experts):
        found = cost_from_shape(GPT_OSS_20B, size.capacity, size.tp, size.cp)
        return JobCosts(model="GPT-OSS-20B", cost=found, size=size)
    names = [name for name in PRESET_NAMES if _shape(name) == shape]
    if len(names) == 1:
        return _of_preset(names[0], size)
    known = f"presets of this shape: {', '.join(names)}" if names else "no known model has it"
    raise ValueError(
        f"{source}: whose costs? {shape[0]} MoE layers x {shape[1]} experts, {known}; give --cost "
        "with a preset's name, or a YAML of `routepack calibrate`"
    )


def _shape(name: str) -> tuple[int, int]:
    corpus = preset(name).corpus
    return corpus.num_layers, corpus.num_experts


def _of_preset(name: str, size: JobSize) -> JobCosts:
    try:
        known = preset(name)
    except ValueError as error:
        raise ValueError(f"--cost: {error}, or a file that ends in .yaml") from None
    topology = known.topology
    there = replace(size, tp=topology.tp, cp=topology.cp, capacity=topology.capacity)
    cost = JobCosts(model=name, cost=known.cost, size=there).at(size)
    return JobCosts(model=name, cost=cost, size=size)
