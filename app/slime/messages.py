"""What crosses process borders between RolloutManager, planner, driver and train actors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from planner.placement import Placement
from rollout_hooks.slime_windows import SealedRollout


@dataclass(frozen=True, kw_only=True, slots=True)
class Sealed:
    """Result of the manager's generate(): the sealed rollout, its data and routing by reference.

    data: ref of slime's converted batch without routing. routing: one ref a sample, or None.
    """

    rollout: SealedRollout
    data: Any
    routing: list[Any] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """The placement of a rollout, milliseconds after sealing: all that state loading waits for.

    policy: what this rollout runs as. placement: of all MoE layers, None if nothing was planned.
    base_version: layout version that it starts from. times: wall clock, seconds.
    """

    rollout_id: int
    policy: str
    placement: Placement | None
    base_version: int
    layer_numbers: tuple[int, ...]
    digest: str
    routing: list[Any] | None
    sealed_at: float
    aux_seconds: float
    placed_at: float
    estimated: bool = False
    """Whether some demand is estimated: then training counts what the routers really do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """The rows of a rollout, packaged by slime's own code: one Box a DP rank."""

    boxes: list[Any]
    schedule_started_at: float
    schedule_ended_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanReport:
    """What to log about a rollout's plan; asked for after training, off the critical path.

    figures: by metric name. slime_cost: modelled cost of slime's own schedule. loads: `[layer, EP
    rank]` routed tokens under identity and under the placement, None if nothing was planned.
    """

    figures: dict[str, float]
    slime_cost: float
    num_tokens: int
    loads: tuple[np.ndarray, np.ndarray] | None = field(default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRollout:
    """What a train actor gets in place of slime's boxes: the planner and two futures."""

    rollout_id: int
    planner: Any
    placed: Any
    rows: Any
