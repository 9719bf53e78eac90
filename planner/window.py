"""The sealed optimizer window: all that the planner knows about its trajectories."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Window:
    """One sealed optimizer window of N trajectories (Section 2.1).

    Raises ValueError when shapes disagree, a length is below 1, a count is negative, or a layer's
    counts do not sum to `routed_rows * top_k` (trajectories marked `estimated` are exempt).
    """

    window_id: int
    """Ordinal of the window; also the shuffle counter of the base policy."""
    length: np.ndarray
    """[trajectory] tokens of the whole trajectory: what caps and dense cost see."""
    routed_rows: np.ndarray
    """[trajectory] positions with a captured routing decision: what demand sees."""
    demand: np.ndarray
    """[trajectory, layer, expert] routed tokens by logical expert, MoE layers only (a_ile)."""
    top_k: int
    """Experts that serve one token."""
    group: np.ndarray = None  # type: ignore[assignment]
    """[trajectory] GRPO group ids in arrival order. Default: every trajectory its own group."""
    estimated: np.ndarray = None  # type: ignore[assignment]
    """[trajectory] True where the demand is an estimate. Default: all False."""
    layer_numbers: tuple[int, ...] = None  # type: ignore[assignment]
    """Global numbers of the L MoE layers. Default: 0 .. L-1."""
    expert_load: np.ndarray = field(init=False, repr=False)
    """[layer, expert] demand summed over the trajectories (L_le), int64."""

    def __post_init__(self) -> None:
        demand = np.asarray(self.demand)
        if demand.ndim != 3 or demand.dtype.kind not in "iu":
            raise ValueError(
                f"Window.demand: got {demand.dtype} with shape {demand.shape}, expected integers "
                "of shape [trajectory, layer, expert]"
            )
        num = demand.shape[0]
        if num == 0:
            raise ValueError(f"Window {self.window_id} holds no trajectory: seal at least one")
        _set(self, "demand", demand)
        _set(self, "length", _vector("length", self.length, num, np.int64))
        _set(self, "routed_rows", _vector("routed_rows", self.routed_rows, num, np.int64))
        group = np.arange(num) if self.group is None else self.group
        _set(self, "group", _vector("group", group, num, np.int64))
        estimated = np.zeros(num, bool) if self.estimated is None else self.estimated
        _set(self, "estimated", _vector("estimated", estimated, num, np.bool_))
        numbers = range(demand.shape[1]) if self.layer_numbers is None else self.layer_numbers
        _set(self, "layer_numbers", tuple(int(number) for number in numbers))
        self._check_values()
        _set(self, "expert_load", demand.sum(axis=0, dtype=np.int64))

    def _check_values(self) -> None:
        if len(self.layer_numbers) != self.num_layers:
            raise ValueError(
                f"Window.layer_numbers: got {len(self.layer_numbers)} numbers, expected one for "
                f"each of the {self.num_layers} MoE layers of demand"
            )
        if self.top_k < 1:
            raise ValueError(f"Window.top_k: got {self.top_k}, expected at least 1")
        short = np.flatnonzero(self.length < 1)
        if len(short):
            raise ValueError(
                f"Window.length: trajectory {short[0]} has {self.length[short[0]]} tokens, "
                "expected at least 1; drop empty trajectories before sealing"
            )
        if self.demand.dtype.kind == "i" and self.demand.size and self.demand.min() < 0:
            where = np.argwhere(self.demand < 0)[0]
            raise ValueError(
                f"Window.demand: negative count at [trajectory, layer, expert] {where}"
            )
        counts = self.demand.sum(axis=2, dtype=np.int64)
        expected = self.routed_rows * self.top_k
        wrong = np.argwhere((counts != expected[:, None]) & ~self.estimated[:, None])
        if len(wrong):
            i, layer = wrong[0]
            raise ValueError(
                f"Window.demand: trajectory {i}, layer {self.layer_numbers[layer]}: counts sum to "
                f"{counts[i, layer]}, expected routed_rows * top_k = {expected[i]}; repair the "
                "capture or mark the trajectory as estimated"
            )

    @property
    def num_trajectories(self) -> int:
        return self.demand.shape[0]

    @property
    def num_layers(self) -> int:
        return self.demand.shape[1]

    @property
    def num_experts(self) -> int:
        return self.demand.shape[2]

    def select(self, indices: np.ndarray) -> Window:
        """The window of the named trajectories, in the order given, under the same window id."""
        indices = np.asarray(indices, np.int64)
        return Window(
            window_id=self.window_id,
            length=self.length[indices],
            routed_rows=self.routed_rows[indices],
            demand=self.demand[indices],
            top_k=self.top_k,
            group=self.group[indices],
            estimated=self.estimated[indices],
            layer_numbers=self.layer_numbers,
        )


def _set(window: Window, name: str, value: object) -> None:
    object.__setattr__(window, name, value)


def _vector(name: str, values: object, num: int, dtype: type) -> np.ndarray:
    array = np.asarray(values)
    if array.shape != (num,):
        raise ValueError(f"Window.{name}: got shape {array.shape}, expected ({num},)")
    if dtype is np.int64 and array.dtype.kind not in "iu":
        raise ValueError(f"Window.{name}: got {array.dtype}, expected integers")
    return array.astype(dtype)
