"""Which of the possible repairs is worth its moves: net benefit, move limits, nodes.

Greedy repair of a layer is a path of swaps; each prefix of it (and the cyclic repair) is an option
with a number of moved experts and a predicted value. A layer's options are reduced to the rising
part of their concave envelope, and the steps of all layers are taken by falling value per move
until the limit: exact for every limit that the envelope meets. Without a limit every layer takes
its best.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.greedy_placement import Repair
from planner.move_cost import MoveCost


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Option:
    """One possible repair of a layer."""

    owner: np.ndarray
    """[expert] EP rank."""
    num_moved: int
    num_cross_node: int
    """Moved experts whose node changes."""
    remote_tokens: int
    """Routed tokens of experts off their home node, more than before."""
    squares: int
    """Reduction of sum_p G_p^2."""
    saved_tokens: int
    """Reduction of max_p G_p."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pricing:
    """Turns an option into seconds."""

    move: MoveCost
    cost_per_token: float
    """Joint cost of one routed token on the busiest rank: 1 / (C x EP groups x shards)."""

    def saving(self, option: Option) -> float:
        return option.saved_tokens * self.cost_per_token * self.move.seconds_per_cost

    def price(self, option: Option) -> float:
        near = option.num_moved - option.num_cross_node
        seconds = near * self.move.seconds_per_byte
        seconds += option.num_cross_node * self.move.seconds_per_remote_byte
        remote = option.remote_tokens * self.move.seconds_per_remote_token
        return seconds * self.move.bytes_per_expert + remote

    def net(self, option: Option) -> float:
        return self.saving(option) - self.price(option)


def option_of(
    load: np.ndarray, before: np.ndarray, owner: np.ndarray, num_ranks: int, ranks_per_node: int
) -> Option:
    """Describes an owner [expert] against the carried one, for load [expert]."""
    total_before = np.bincount(before, load, num_ranks).astype(np.int64)
    total = np.bincount(owner, load, num_ranks).astype(np.int64)
    moved = owner != before
    crossed = owner // ranks_per_node != before // ranks_per_node
    home = np.arange(len(load)) // (len(load) // num_ranks) // ranks_per_node
    away = (
        load[owner // ranks_per_node != home].sum() - load[before // ranks_per_node != home].sum()
    )
    return Option(
        owner=owner.copy(),
        num_moved=int(moved.sum()),
        num_cross_node=int(crossed.sum()),
        remote_tokens=int(away),
        squares=int((total_before**2).sum() - (total**2).sum()),
        saved_tokens=int(total_before.max() - total.max()),
    )


def path_options(
    load: np.ndarray,
    before: np.ndarray,
    start: np.ndarray,
    repair: Repair,
    layer: int,
    num_ranks: int,
    ranks_per_node: int,
) -> list[Option]:
    """The options after each swap of a layer's repair, which began at owner `start` [expert]."""
    owner = start.copy()
    options = []
    for a, b in repair.path[layer, : repair.num_swaps[layer]]:
        owner[a], owner[b] = owner[b], owner[a]
        options.append(option_of(load, before, owner, num_ranks, ranks_per_node))
    return options


def choose(
    options: list[list[Option]], value: list[list[float]], max_moves: int | None
) -> list[Option | None]:
    """One option per layer, or None for no change.

    Args: options[layer] with value[layer] (0 for no change); max_moves: limit over all layers.
    """
    chosen: list[Option | None] = [None] * len(options)
    steps = []
    for layer, candidates in enumerate(options):
        corners = _rising_envelope([option.num_moved for option in candidates], value[layer])
        moves, worth = 0, 0.0
        for order, k in enumerate(corners):
            added = candidates[k].num_moved - moves
            gain = value[layer][k] - worth
            steps.append((-gain / max(added, 1), layer, order, added, k))
            moves, worth = candidates[k].num_moved, value[layer][k]
    left = max_moves
    blocked = set()
    for _, layer, _, added, k in sorted(steps):
        if layer in blocked:
            continue
        if left is not None and added > left:
            blocked.add(layer)
            continue
        chosen[layer] = options[layer][k]
        if left is not None:
            left -= added
    return chosen


def _rising_envelope(moves: list[int], value: list[float]) -> list[int]:
    """Indices of the rising part of the upper concave envelope over (0, 0) and the points."""
    corners: list[int] = []
    at = (0, 0.0)
    while True:
        best = None
        for k in range(len(moves)):
            if value[k] <= at[1] or moves[k] < at[0] or (moves[k] == at[0] and corners):
                continue
            slope = (value[k] - at[1]) / max(moves[k] - at[0], 1e-9)
            key = (-slope, -moves[k], k)
            if best is None or key < best[0]:
                best = (key, k)
        if best is None:
            return corners
        corners.append(best[1])
        at = (moves[best[1]], value[best[1]])


def cv_lower_bound(load: np.ndarray, num_ranks: int) -> np.ndarray:
    """[layer] a CV that no placement of load [layer, expert] can beat.

    The rank of the hottest expert holds at least it and the E/P - 1 smallest others; what exceeds
    the mean cannot be balanced away. Certifies a target that cannot be met.
    """
    load = np.sort(np.asarray(load, np.int64), axis=1)
    per_rank = load.shape[1] // num_ranks
    least = load[:, -1] + load[:, : per_rank - 1].sum(axis=1)
    mean = load.sum(axis=1) / num_ranks
    above = np.maximum(0.0, least - mean)
    if num_ranks == 1:
        return np.zeros(len(load))
    deviation = np.sqrt((above**2 + above**2 / (num_ranks - 1)) / num_ranks)
    return np.where(mean > 0, deviation / np.where(mean > 0, mean, 1.0), 0.0)
