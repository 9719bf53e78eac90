"""Expert placement of one window: repair the carried placement, stop where asked (Section 3.2)."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from planner.options import PlannerOptions, check_sizes
from planner.placement import Placement, coefficient_of_variation
from planner.placing.choice import (
    FIGURES,
    Figures,
    Pricing,
    choose,
    cv_lower_bound,
    figures_along,
    figures_of,
    figures_of_layers,
    owner_load,
)
from planner.placing.few_moves import cyclic_repair_layers, random_orders
from planner.placing.greedy import TARGET_MET, Repair, greedy_repair
from planner.policies import policy_of
from planner.topology import Topology
from planner.window import Window


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementResult:
    """A placement, why the repair stopped, and what it is predicted to cost and save."""

    placement: Placement
    num_moved: int
    """Experts that change their slot, over all layers."""
    cv_max: float
    """Largest rank-load CV of any layer, after the repair."""
    cv_before: float
    """The same under the carried placement."""
    stop_reason: str
    """`not_placed`, `cv_target`, `no_improving_swap`, `net_benefit`, `max_moves`, or
    `carried_is_faster` (`make_plan` of full)."""
    seconds: float
    cv_bound: float = 0.0
    """Largest CV that no placement can beat, over the layers: above the target, a certificate."""
    num_cross_node: int = 0
    """Moved experts whose node changes (with `ranks_per_node`)."""
    added_remote_tokens: int = 0
    """Routed tokens of experts off their home node, more than under the carried placement."""
    predicted_saving: float = 0.0
    """Seconds of the window that the moves save, by `MoveCost`."""
    predicted_cost: float = 0.0
    """Seconds that the moves take, by `MoveCost`."""


def place(
    window: Window, topology: Topology, carried: Placement, policy: str, options: PlannerOptions
) -> PlacementResult:
    """Repairs the carried placement for the window's demand; takes milliseconds.

    Policies that do not move experts return `carried` itself. Unmoved experts keep their slots.
    """
    start = time.perf_counter()
    places = policy_of(policy).places
    check_sizes(window, topology, carried)
    load = window.expert_load
    before = carried.owner.astype(np.int64)
    owner, placement, reason = before, carried, "not_placed"
    if places:
        if _takes_all_swaps(topology, options):
            owner, reason = _repair_to_target(load, before, topology, options, window.window_id)
        else:
            owner, reason = _repair_what_pays(load, before, topology, options, window.window_id)
        placement = carried.with_owner(owner)
    num_ranks = topology.num_ep_ranks
    cv_before, cv_after = (
        coefficient_of_variation(owner_load(load, of, num_ranks)) for of in (before, owner)
    )
    node = topology.ranks_per_node or num_ranks
    changes = figures_of_layers(load, before, owner, num_ranks, node)
    pricing = _pricing(topology, options)
    return PlacementResult(
        placement=placement,
        num_moved=placement.num_moved(carried),
        cv_max=float(cv_after.max(initial=0.0)),
        cv_before=float(cv_before.max(initial=0.0)),
        stop_reason=reason,
        seconds=time.perf_counter() - start,
        cv_bound=float(cv_lower_bound(load, topology.num_ep_ranks).max(initial=0.0)),
        num_cross_node=int(changes.num_cross_node.sum()),
        added_remote_tokens=int(changes.remote_tokens.sum()),
        predicted_saving=float(np.sum(pricing.saving(changes))),
        predicted_cost=float(np.sum(pricing.price(changes))),
    )


def _takes_all_swaps(topology: Topology, options: PlannerOptions) -> bool:
    return (
        options.stop == "cv" and options.moves_allowed is None and topology.ranks_per_node is None
    )


def _repair_to_target(
    load: np.ndarray, before: np.ndarray, topology: Topology, options: PlannerOptions, seed: int
) -> tuple[np.ndarray, str]:
    """Every swap until the CV target, as in the paper: (owner [layer, expert], stop reason)."""
    if options.placement == "few_moves":
        repair = _cyclic(load, before, topology, options, seed)
    else:
        repair = greedy_repair(load, before, topology.num_ep_ranks, options.cv_target)
    met = (repair.reason == TARGET_MET).all()
    return repair.owner, "cv_target" if met else "no_improving_swap"


def _cyclic(
    load: np.ndarray, before: np.ndarray, topology: Topology, options: PlannerOptions, seed: int
) -> Repair:
    num_layers, num_ranks = len(load), topology.num_ep_ranks
    owner = before.copy()
    moved = np.zeros(num_layers, np.int64)
    reason = np.zeros(num_layers, np.int64)
    orders = random_orders(num_layers, num_ranks, seed)
    cyclic_repair_layers(load, owner, num_ranks, options.cv_target, orders, moved, reason)
    none = np.zeros((num_layers, 0, 2), np.int32)
    return Repair(owner=owner, path=none, num_swaps=np.zeros_like(moved), reason=reason)


def _repair_what_pays(
    load: np.ndarray, before: np.ndarray, topology: Topology, options: PlannerOptions, seed: int
) -> tuple[np.ndarray, str]:
    """The repairs of each layer that pay for their moves, within the limit on moves.

    With nodes, swaps inside a node come first; a swap across nodes is taken only with a positive
    modelled net gain, whatever the stop rule.
    """
    num_ranks = topology.num_ep_ranks
    node = topology.ranks_per_node or num_ranks
    inside = greedy_repair(load, before, num_ranks, options.cv_target, node)
    across = None
    if node < num_ranks:
        across = greedy_repair(load, inside.owner, num_ranks, options.cv_target)
    cyclic = None
    if options.placement == "few_moves" and across is None:
        cyclic = _cyclic(load, before, topology, options, seed)
    found = [
        _layer_options(load, before, layer, inside, across, cyclic, topology, options)
        for layer in range(len(load))
    ]
    moves = [figures.num_moved for figures, _ in found]
    values = [value for _, value in found]
    best = choose(moves, values, None)
    chosen = best
    if options.moves_allowed is not None:
        chosen = choose(moves, values, options.moves_allowed)
    owner = before.copy()
    for layer, option in enumerate(chosen):
        if option >= 0:
            _apply(owner[layer], layer, option, inside, across, cyclic)
    if chosen != best:
        return owner, "max_moves"
    if options.stop == "net_benefit" or across is not None:
        return owner, "net_benefit"
    met = (inside.reason == TARGET_MET).all()
    return owner, "cv_target" if met else "no_improving_swap"


def _layer_options(
    load: np.ndarray,
    before: np.ndarray,
    layer: int,
    inside: Repair,
    across: Repair | None,
    cyclic: Repair | None,
    topology: Topology,
    options: PlannerOptions,
) -> tuple[Figures, np.ndarray]:
    """A layer's options: every prefix of its swaps, then the cyclic repair: (figures, values)."""
    num_ranks = topology.num_ep_ranks
    node = topology.ranks_per_node or num_ranks
    layer_load, layer_before = load[layer], before[layer]
    tables = [np.zeros((inside.num_swaps[layer], len(FIGURES)), np.int64)]
    path = inside.path[layer, : len(tables[0])]
    figures_along(layer_load, layer_before, layer_before, path, num_ranks, node, tables[0])
    if across is not None:
        tables.append(np.zeros((across.num_swaps[layer], len(FIGURES)), np.int64))
        path = across.path[layer, : len(tables[1])]
        start = inside.owner[layer]
        figures_along(layer_load, layer_before, start, path, num_ranks, node, tables[1])
    if cyclic is not None:
        owner = cyclic.owner[layer]
        tables.append(np.array([figures_of(layer_load, layer_before, owner, num_ranks, node)]))
    figures = Figures(*np.concatenate(tables).T)
    pricing = _pricing(topology, options)
    net = np.asarray(pricing.net(figures), np.float64)
    value = net if options.stop == "net_benefit" else figures.squares.astype(np.float64)
    if across is not None:
        num_inside = len(tables[0])
        base = net[num_inside - 1] if num_inside else 0.0
        worthless = (np.arange(len(net)) >= num_inside) & (net <= base)
        value = np.where(worthless, -np.inf, value)
    return figures, value


def _apply(
    owner: np.ndarray,
    layer: int,
    option: int,
    inside: Repair,
    across: Repair | None,
    cyclic: Repair | None,
) -> None:
    """Carries out an option of `_layer_options` on owner [expert], in place."""
    num_inside = int(inside.num_swaps[layer])
    if cyclic is not None and option == num_inside:
        owner[:] = cyclic.owner[layer]
        return
    swaps = inside.path[layer, : min(option + 1, num_inside)]
    if across is not None and option >= num_inside:
        swaps = np.concatenate([swaps, across.path[layer, : option + 1 - num_inside]])
    swapped = owner.tolist()
    for a, b in swaps.tolist():
        swapped[a], swapped[b] = swapped[b], swapped[a]
    owner[:] = swapped


def _pricing(topology: Topology, options: PlannerOptions) -> Pricing:
    per_token = 1.0 / (topology.capacity * topology.ep_groups_per_shard * topology.num_shards)
    return Pricing(move=options.move, cost_per_token=per_token)
