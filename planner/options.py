"""Every knob of the planner, in one dataclass."""

from __future__ import annotations

from dataclasses import dataclass, field

from planner.move_cost import MoveCost
from planner.placement import Placement
from planner.topology import Topology
from planner.window import Window

_CHOICES = {
    "rows": ("makespan", "paper"),
    "rows_from": ("dp_local_ffd", "slime"),
    "placement": ("greedy", "few_moves"),
    "stop": ("cv", "net_benefit"),
    "engine": ("pair_anneal", "population_annealing"),
    "long_trajectory": ("warn", "error"),
    "too_few": ("drop", "error"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannerOptions:
    """Every knob of the planner. Raises ValueError on a value that is not listed."""

    rows: str = "makespan"
    """`makespan`: the number of rows by predicted 1F1B time; `paper`: max(R_min, 2 PP)."""
    rows_from: str = "dp_local_ffd"
    """Rows that reroute keeps: `dp_local_ffd` or `slime`."""
    placement: str = "greedy"
    """`greedy`: exact best swaps; `few_moves`: cyclic repair first, fewest experts moved."""
    stop: str = "cv"
    """`cv`: repair until the rank-load CV target; `net_benefit`: while a swap pays for its move."""
    cv_target: float = 5e-4
    max_moves: int | None = None
    """Most experts moved by one placement, over all layers; None: no limit."""
    max_mb: float | None = None
    """Most megabytes moved by one placement (needs move.bytes_per_expert); None: no limit."""
    move: MoveCost = field(default_factory=MoveCost)
    """Calibration of what a move costs and a balanced layer saves."""
    engine: str = "pair_anneal"
    budget_seconds: float | None = 1.0
    """Wall time of one search; None: no limit (then give budget_proposals)."""
    budget_proposals: int | None = None
    """Proposals of one search over all threads; deterministic when budget_seconds is None."""
    max_rank_tokens: int | None = None
    """Memory guard: routed tokens that an EP rank should receive at most in one row and layer."""
    copy_weight: float = 0.0
    """Weight of the busiest rank's deduplicated token copies (1: as dear as its expert work); needs
    token-level routing (`schedule(copies=...)`)."""
    num_threads: int = 2
    seed: int = 0
    shard_size: int = 8
    """Trajectories of one GRPO group: the unit that base deals to DP slots."""
    slime_balance_data: bool = False
    """Whether slime runs with --balance-data (Karmarkar-Karp over the DP slots)."""
    long_trajectory: str = "warn"
    """A trajectory above the cap gets a cell of its own (`warn`) or is refused (`error`)."""
    too_few: str = "drop"
    """Too few trajectories for rows without an empty cell: drop trailing groups, or refuse."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"PlannerOptions.{name}: got {getattr(self, name)!r}, expected one of {choices}"
                )
        for name in ("num_threads", "shard_size", "max_rank_tokens"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(
                    f"PlannerOptions.{name}: got {getattr(self, name)}, expected at least 1"
                )
        if self.budget_seconds is None and self.budget_proposals is None:
            raise ValueError(
                "PlannerOptions: budget_seconds and budget_proposals are both None; give one"
            )
        for name in (
            "budget_seconds",
            "budget_proposals",
            "cv_target",
            "max_moves",
            "max_mb",
            "copy_weight",
        ):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"PlannerOptions.{name}: got {value}, expected at least 0")

    @property
    def moves_allowed(self) -> int | None:
        """Most experts that one placement may move: the tighter of max_moves and max_mb."""
        limits = [] if self.max_moves is None else [self.max_moves]
        if self.max_mb is not None and self.move.bytes_per_expert > 0:
            limits.append(int(self.max_mb * 2**20 // self.move.bytes_per_expert))
        return min(limits, default=None)


def check_sizes(window: Window, topology: Topology, placement: Placement) -> None:
    """Raises ValueError when window, topology and placement do not describe one job."""
    expected = (window.num_layers, window.num_experts)
    if placement.expert_of_slot.shape != expected:
        raise ValueError(
            f"placement: covers [layer, expert] {placement.expert_of_slot.shape}, the window has "
            f"{expected}"
        )
    if placement.num_ep_ranks != topology.num_ep_ranks:
        raise ValueError(
            f"placement: {placement.num_ep_ranks} EP ranks, the topology has "
            f"{topology.num_ep_ranks}"
        )
