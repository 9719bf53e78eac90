"""What a moved expert costs and what a balanced layer saves, in seconds of one window."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveCost:
    """Calibration behind `stop: net_benefit`, `max_mb` and cross-node swaps; zeros make moves free.

    Raises ValueError on a negative or infinite value.
    """

    bytes_per_expert: float = 0.0
    """Bytes that move with one expert of one layer: parameters, fp32 main shard, both moments."""
    seconds_per_byte: float = 0.0
    """Measured commit seconds over bytes moved, for moves inside a node."""
    seconds_per_remote_byte: float = 0.0
    """The same for moves across nodes."""
    seconds_per_remote_token: float = 0.0
    """Added time for one routed token of an expert that lives off its home node (its node under
    identity placement, where group-limited routing expects it)."""
    seconds_per_cost: float = 1.0
    """Measured seconds per unit of modelled joint cost: what turns balance into time."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(
                    f"MoveCost.{field.name}: got {value}, expected a finite number >= 0"
                )
