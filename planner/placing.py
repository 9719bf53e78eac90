"""Expert placement of one window: repair the carried placement, stop where asked (Section 3.2)."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from planner.few_moves import cyclic_repair_layers, random_orders
from planner.greedy_placement import LIMIT_REACHED, TARGET_MET, Repair, greedy_repair
from planner.options import MOVES_EXPERTS, PlannerOptions, check_policy, check_sizes
from planner.placement import Placement, coefficient_of_variation, rank_load
from planner.placement_choice import (
    Option,
    Pricing,
    choose,
    cv_lower_bound,
    option_of,
    path_options,
)
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
    """`not_placed`, `cv_target`, `no_improving_swap`, `net_benefit` or `max_moves`."""
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
    check_policy(policy)
    check_sizes(window, topology, carried)
    load = window.expert_load
    before = carried.owner.astype(np.int64)
    placement, reason = carried, "not_placed"
    if policy in MOVES_EXPERTS:
        if _takes_all_swaps(topology, options):
            owner, reason = _repair_to_target(load, before, topology, options, window.window_id)
        else:
            owner, reason = _repair_what_pays(load, before, topology, options, window.window_id)
        placement = carried.with_owner(owner)
    cv_before = coefficient_of_variation(rank_load(load, carried))
    cv_after = coefficient_of_variation(rank_load(load, placement))
    changes = _changes(load, before, placement, topology)
    pricing = _pricing(topology, options)
    return PlacementResult(
        placement=placement,
        num_moved=placement.num_moved(carried),
        cv_max=float(cv_after.max(initial=0.0)),
        cv_before=float(cv_before.max(initial=0.0)),
        stop_reason=reason,
        seconds=time.perf_counter() - start,
        cv_bound=float(cv_lower_bound(load, topology.num_ep_ranks).max(initial=0.0)),
        num_cross_node=sum(change.num_cross_node for change in changes),
        added_remote_tokens=sum(change.remote_tokens for change in changes),
        predicted_saving=sum(pricing.saving(change) for change in changes),
        predicted_cost=sum(pricing.price(change) for change in changes),
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
    near = greedy_repair(load, before, num_ranks, options.cv_target, node)
    stages = [near]
    if node < num_ranks:
        stages.append(greedy_repair(load, near.owner, num_ranks, options.cv_target))
    pricing = _pricing(topology, options)
    cyclic = None
    if options.placement == "few_moves" and node >= num_ranks:
        cyclic = _cyclic(load, before, topology, options, seed)
    candidates: list[list[Option]] = []
    values: list[list[float]] = []
    for layer in range(len(load)):
        found = path_options(
            load[layer], before[layer], before[layer], near, layer, num_ranks, node
        )
        worth = [_value(option, pricing, options) for option in found]
        if len(stages) > 1:
            inside = found[-1] if found else None
            base = pricing.net(inside) if inside else 0.0
            across = path_options(
                load[layer], before[layer], near.owner[layer], stages[1], layer, num_ranks, node
            )
            across = [option for option in across if pricing.net(option) > base]
            found += across
            worth += [_value(option, pricing, options) for option in across]
        if cyclic is not None and (cyclic.owner[layer] != before[layer]).any():
            found.append(
                option_of(load[layer], before[layer], cyclic.owner[layer], num_ranks, node)
            )
            worth.append(_value(found[-1], pricing, options))
        candidates.append(found)
        values.append(worth)
    best = choose(candidates, values, None)
    chosen = best
    if options.moves_allowed is not None:
        chosen = choose(candidates, values, options.moves_allowed)
    owner = before.copy()
    for layer, option in enumerate(chosen):
        if option is not None:
            owner[layer] = option.owner
    if _num_moved(chosen) < _num_moved(best):
        return owner, "max_moves"
    if options.stop == "net_benefit" or topology.ranks_per_node is not None:
        return owner, "net_benefit"
    unmet = (
        any((stage.reason == LIMIT_REACHED).any() for stage in stages)
        or not (stages[-1].reason == TARGET_MET).all()
    )
    return owner, "no_improving_swap" if unmet else "cv_target"


def _value(option: Option, pricing: Pricing, options: PlannerOptions) -> float:
    """What a layer's repair is worth: seconds, or balance when every swap is wanted."""
    return pricing.net(option) if options.stop == "net_benefit" else float(option.squares)


def _num_moved(chosen: list[Option | None]) -> int:
    return sum(option.num_moved for option in chosen if option is not None)


def _pricing(topology: Topology, options: PlannerOptions) -> Pricing:
    per_token = 1.0 / (topology.capacity * topology.ep_groups_per_shard * topology.num_shards)
    return Pricing(move=options.move, cost_per_token=per_token)


def _changes(
    load: np.ndarray, before: np.ndarray, placement: Placement, topology: Topology
) -> list[Option]:
    """What changes in each layer whose owners change."""
    owner = placement.owner
    node = topology.ranks_per_node or topology.num_ep_ranks
    return [
        option_of(load[layer], before[layer], owner[layer], topology.num_ep_ranks, node)
        for layer in np.flatnonzero((owner != before).any(axis=1))
    ]
