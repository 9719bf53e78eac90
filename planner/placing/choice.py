"""Which of the possible repairs is worth its moves: net benefit, move limits, nodes.

Greedy repair of a layer is a path of swaps; each prefix of it (and the cyclic repair) is an option
with a number of moved experts and a predicted value. A layer's options are reduced to the rising
part of their concave envelope, and the steps of all layers are taken by falling value per move
until the limit: exact for every limit that the envelope meets. Without a limit every layer takes
its best.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numba
import numpy as np

from planner.move_cost import MoveCost

FIGURES = ("num_moved", "num_cross_node", "remote_tokens", "squares", "saved_tokens")


class Figures(NamedTuple):
    """What one repair of a layer changes; of several repairs, arrays [option]."""

    num_moved: Any
    """Experts whose EP rank changes."""
    num_cross_node: Any
    """Those whose node changes."""
    remote_tokens: Any
    """Routed tokens of experts off their home node, more than before."""
    squares: Any
    """Reduction of sum_p G_p^2."""
    saved_tokens: Any
    """Reduction of max_p G_p."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pricing:
    """Turns figures into seconds."""

    move: MoveCost
    cost_per_token: float
    """Joint cost of one routed token on the busiest rank: 1 / (C x EP groups x shards)."""

    def saving(self, figures: Figures) -> float:
        return figures.saved_tokens * self.cost_per_token * self.move.seconds_per_cost

    def price(self, figures: Figures) -> float:
        near = figures.num_moved - figures.num_cross_node
        seconds = near * self.move.seconds_per_byte
        seconds += figures.num_cross_node * self.move.seconds_per_remote_byte
        remote = figures.remote_tokens * self.move.seconds_per_remote_token
        return seconds * self.move.bytes_per_expert + remote

    def net(self, figures: Figures) -> float:
        return self.saving(figures) - self.price(figures)


@numba.njit(cache=True, nogil=True)
def figures_along(load, before, start, path, num_ranks, ranks_per_node, figures):
    """Figures after each swap of a path that begins at owner `start` [expert].

    Fills figures [swap, 5] in the order of FIGURES, all against owner `before` [expert].
    """
    num_experts = load.shape[0]
    per_node = num_experts // num_ranks * ranks_per_node
    owner = start.copy()
    total_before = np.zeros(num_ranks, np.int64)
    total = np.zeros(num_ranks, np.int64)
    moved = 0
    crossed = 0
    remote = 0
    for expert in range(num_experts):
        total_before[before[expert]] += load[expert]
        total[owner[expert]] += load[expert]
        moved += owner[expert] != before[expert]
        node = owner[expert] // ranks_per_node
        node_before = before[expert] // ranks_per_node
        crossed += node != node_before
        home = expert // per_node
        remote += load[expert] * ((node != home) - (node_before != home))
    squares_before = (total_before**2).sum()
    for swap in range(path.shape[0]):
        a, b = path[swap]
        for expert, rank in ((a, owner[b]), (b, owner[a])):
            home = expert // per_node
            node, node_next = owner[expert] // ranks_per_node, rank // ranks_per_node
            node_before = before[expert] // ranks_per_node
            moved += (rank != before[expert]) - (owner[expert] != before[expert])
            crossed += (node_next != node_before) - (node != node_before)
            remote += load[expert] * ((node_next != home) - (node != home))
            total[owner[expert]] -= load[expert]
            total[rank] += load[expert]
        owner[a], owner[b] = owner[b], owner[a]
        figures[swap, 0] = moved
        figures[swap, 1] = crossed
        figures[swap, 2] = remote
        figures[swap, 3] = squares_before - (total**2).sum()
        figures[swap, 4] = total_before.max() - total.max()


def figures_of(
    load: np.ndarray, before: np.ndarray, owner: np.ndarray, num_ranks: int, ranks_per_node: int
) -> Figures:
    """Figures of owner [expert] against `before`; the plain numpy twin of `figures_along`."""
    total_before = np.bincount(before, load, num_ranks).astype(np.int64)
    total = np.bincount(owner, load, num_ranks).astype(np.int64)
    home = np.arange(len(load)) // (len(load) // num_ranks) // ranks_per_node
    away = load[owner // ranks_per_node != home].sum()
    return Figures(
        num_moved=int((owner != before).sum()),
        num_cross_node=int((owner // ranks_per_node != before // ranks_per_node).sum()),
        remote_tokens=int(away - load[before // ranks_per_node != home].sum()),
        squares=int((total_before**2).sum() - (total**2).sum()),
        saved_tokens=int(total_before.max() - total.max()),
    )


def figures_of_layers(
    load: np.ndarray, before: np.ndarray, owner: np.ndarray, num_ranks: int, ranks_per_node: int
) -> Figures:
    """`figures_of` of every layer of load, before, owner [layer, expert]: arrays [layer]."""
    num_layers, num_experts = load.shape
    total_before = owner_load(load, before, num_ranks)
    total = owner_load(load, owner, num_ranks)
    remote = num_cross_node = np.zeros(num_layers, np.int64)
    if ranks_per_node < num_ranks:
        home = np.arange(num_experts) // (num_experts // num_ranks) // ranks_per_node
        node, node_before = owner // ranks_per_node, before // ranks_per_node
        remote = (load * ((node != home).astype(np.int64) - (node_before != home))).sum(axis=1)
        num_cross_node = (node != node_before).sum(axis=1)
    return Figures(
        num_moved=(owner != before).sum(axis=1),
        num_cross_node=num_cross_node,
        remote_tokens=remote,
        squares=(total_before**2).sum(axis=1) - (total**2).sum(axis=1),
        saved_tokens=total_before.max(axis=1) - total.max(axis=1),
    )


def owner_load(load: np.ndarray, owner: np.ndarray, num_ranks: int) -> np.ndarray:
    """[layer, EP rank] routed tokens of load [layer, expert] under owner [layer, expert]."""
    num_layers = len(load)
    flat = (owner + num_ranks * np.arange(num_layers)[:, None]).ravel()
    total = np.bincount(flat, load.ravel(), num_layers * num_ranks)
    return total.astype(np.int64).reshape(num_layers, num_ranks)


def choose(
    num_moved: list[np.ndarray], value: list[np.ndarray], max_moves: int | None
) -> list[int]:
    """The chosen option of each layer, or -1 for no change.

    Args: num_moved[layer] [option] experts moved; value[layer] [option] worth (0 for no change);
    max_moves: limit over all layers.
    """
    chosen = [-1] * len(value)
    steps = []
    for layer in range(len(value)):
        moves, worth = 0, 0.0
        for order, k in enumerate(_rising_envelope(num_moved[layer], value[layer])):
            added = int(num_moved[layer][k]) - moves
            gain = float(value[layer][k]) - worth
            steps.append((-gain / max(added, 1), layer, order, added, k))
            moves, worth = moves + added, worth + gain
    left = max_moves
    blocked = set()
    for _, layer, _, added, k in sorted(steps):
        if layer in blocked:
            continue
        if left is not None and added > left:
            blocked.add(layer)
            continue
        chosen[layer] = k
        if left is not None:
            left -= added
    return chosen


def _rising_envelope(moves: np.ndarray, value: np.ndarray) -> list[int]:
    """Indices of the rising part of the upper concave envelope over (0, 0) and the points."""
    corners: list[int] = []
    at_moves, at_value = 0, 0.0
    while True:
        rising = np.flatnonzero((value > at_value) & (moves > at_moves))
        if not corners:
            rising = np.flatnonzero(value > at_value)
        if not len(rising):
            return corners
        slope = (value[rising] - at_value) / np.maximum(moves[rising] - at_moves, 1e-9)
        steepest = rising[slope >= slope.max() * (1 - 1e-12)]
        corner = int(steepest[np.argmax(moves[steepest])])
        corners.append(corner)
        at_moves, at_value = int(moves[corner]), float(value[corner])


def cv_lower_bound(load: np.ndarray, num_ranks: int) -> np.ndarray:
    """[layer] a CV that no placement of load [layer, expert] can beat.

    The rank of the hottest expert holds at least it and the E/P - 1 smallest others; what exceeds
    the mean cannot be balanced away. Certifies a target that cannot be met.
    """
    load = np.asarray(load, np.int64)
    per_rank = load.shape[1] // num_ranks
    smallest = np.partition(load, per_rank - 1, axis=1)[:, : per_rank - 1]
    least = load.max(axis=1) + smallest.sum(axis=1)
    mean = load.sum(axis=1) / num_ranks
    above = np.maximum(0.0, least - mean)
    if num_ranks == 1:
        return np.zeros(len(load))
    deviation = np.sqrt((above**2 + above**2 / (num_ranks - 1)) / num_ranks)
    return np.where(mean > 0, deviation / np.where(mean > 0, mean, 1.0), 0.0)
