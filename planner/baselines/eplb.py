"""EPLB: full rebuild of the expert placement from each window's load (Section 3.3, Table 5).

Pack expert groups to nodes, replicate the hottest experts inside a node, pack the replicas to its
ranks; every packing gives the heaviest item left to the lightest pack with room. With R0 nothing
is replicated; with R2, R4 and R8 every EP rank has that many extra slots and a replicated expert's
load is split evenly over its replicas, which is an idealisation.
Peer: deepseek-ai/EPLB `eplb.py`. Ties go to the lower index. `compiled=False` is plain Python, as
the peer is; it is what planning speed is compared against.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from planner.placement import Placement


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EplbPlan:
    """Which logical expert sits in which physical slot, replicas included.

    expert_of_slot: int64 `[layer, slot]`; slot s lives on EP rank s // (slots / P).
    num_replicas: int64 `[layer, expert]`, at least 1.
    """

    expert_of_slot: NDArray[np.int64]
    num_replicas: NDArray[np.int64]
    num_ep_ranks: int

    def rank_load(self, expert_load: NDArray[np.integer]) -> NDArray[np.float64]:
        """Tokens `[layer, EP rank]` for demand `[layer, expert]`, replicas sharing evenly."""
        share = np.asarray(expert_load, np.float64) / self.num_replicas
        by_slot = np.take_along_axis(share, self.expert_of_slot, 1)
        return by_slot.reshape(len(by_slot), self.num_ep_ranks, -1).sum(2)

    def num_moved(self, previous: EplbPlan | Placement) -> int:
        """Slots, over all layers, whose expert was not on their EP rank before.

        Without replicas these are the experts that change rank.
        Raises ValueError when layers or EP ranks differ.
        """
        before = np.asarray(previous.expert_of_slot)
        layers, ranks = len(self.expert_of_slot), self.num_ep_ranks
        if len(before) != layers or previous.num_ep_ranks != ranks:
            raise ValueError(
                f"previous: {len(before)} layers on {previous.num_ep_ranks} EP ranks, expected "
                f"{layers} on {ranks}"
            )
        now, then = (a.reshape(layers * ranks, -1).tolist() for a in (self.expert_of_slot, before))
        kept = sum(
            (Counter(mine) & Counter(held)).total() for mine, held in zip(now, then, strict=True)
        )
        return self.expert_of_slot.size - kept

    def placement(self) -> Placement:
        """The placement of R0; raises ValueError when an expert is replicated."""
        if (self.num_replicas != 1).any():
            raise ValueError("replicated experts have no placement; plan with replicas_per_rank=0")
        return Placement(expert_of_slot=self.expert_of_slot, num_ep_ranks=self.num_ep_ranks)


def eplb(
    expert_load: NDArray[np.integer],
    num_ep_ranks: int,
    *,
    replicas_per_rank: int = 0,
    num_groups: int = 1,
    num_nodes: int = 1,
    compiled: bool = True,
) -> EplbPlan:
    """Rebuild the placement of every layer.

    expert_load: demand of the window `[layer, expert]`.
    replicas_per_rank: extra slots of each EP rank (0, 2, 4, 8 in Table 5).
    num_groups: expert groups of a group-limited router; num_nodes: nodes of the EP group. Where the
        groups do not divide over the nodes, the global policy packs over all ranks at once.
    Raises ValueError when experts, groups, ranks or slots do not divide.
    """
    num_layers, num_experts = expert_load.shape
    _check(num_experts, num_ep_ranks, replicas_per_rank, num_groups, num_nodes)
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    num_slots = num_experts + replicas_per_rank * num_ep_ranks
    expert_of_slot = np.empty((num_layers, num_slots), np.int64)
    num_replicas = np.empty((num_layers, num_experts), np.int64)
    for layer in range(num_layers):
        load = expert_load[layer].astype(np.float64).tolist()
        slots, replicas = _layer(load, num_slots, num_ep_ranks, num_groups, num_nodes, compiled)
        expert_of_slot[layer] = slots
        num_replicas[layer] = replicas
    return EplbPlan(
        expert_of_slot=expert_of_slot, num_replicas=num_replicas, num_ep_ranks=num_ep_ranks
    )


def _check(
    num_experts: int, num_ep_ranks: int, replicas_per_rank: int, num_groups: int, num_nodes: int
) -> None:
    if num_ep_ranks < 1 or num_experts % num_ep_ranks:
        raise ValueError(f"num_ep_ranks: {num_ep_ranks} does not divide {num_experts} experts")
    if replicas_per_rank < 0:
        raise ValueError(f"replicas_per_rank: expected at least 0, got {replicas_per_rank}")
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"num_groups: {num_groups} does not divide {num_experts} experts")
    if num_nodes < 1 or num_ep_ranks % num_nodes:
        raise ValueError(f"num_nodes: {num_nodes} does not divide {num_ep_ranks} EP ranks")


def _layer(
    load: list[float],
    num_slots: int,
    num_ep_ranks: int,
    num_groups: int,
    num_nodes: int,
    compiled: bool,
) -> tuple[list[int], list[int]]:
    """(logical expert by slot, replicas by expert) of one layer."""
    pack = _pack_compiled if compiled else _pack
    group_size = len(load) // num_groups
    of_group = [sum(load[g * group_size : (g + 1) * group_size]) for g in range(num_groups)]
    node_of_group, _ = pack(of_group, num_nodes)
    slots: list[int] = []
    replicas = [0] * len(load)
    for node in range(num_nodes):
        experts = [
            g * group_size + i
            for g in range(num_groups)
            if node_of_group[g] == node
            for i in range(group_size)
        ]
        held, count = _replicate([load[e] for e in experts], num_slots // num_nodes)
        share = [load[experts[e]] / count[e] for e in held]
        rank, position = pack(share, num_ep_ranks // num_nodes)
        per_rank = num_slots // num_ep_ranks
        on_node = [0] * len(held)
        for slot, e in enumerate(held):
            on_node[rank[slot] * per_rank + position[slot]] = experts[e]
        slots += on_node
        for e, expert in enumerate(experts):
            replicas[expert] = count[e]
    return slots, replicas


def _replicate(load: list[float], num_slots: int) -> tuple[list[int], list[int]]:
    """(expert by slot, replicas by expert): each extra slot goes to the largest load a replica."""
    held = list(range(len(load)))
    count = [1] * len(load)
    by_load = [(-tokens, e) for e, tokens in enumerate(load)]
    heapq.heapify(by_load)
    for _ in range(num_slots - len(load)):
        hottest = by_load[0][1]
        held.append(hottest)
        count[hottest] += 1
        heapq.heapreplace(by_load, (-load[hottest] / count[hottest], hottest))
    return held, count


def _pack(weight: list[float], num_packs: int) -> tuple[list[int], list[int]]:
    """(pack, position in it) of each item; every pack gets the same number of items."""
    per_pack = len(weight) // num_packs
    if per_pack == 1:
        return list(range(num_packs)), [0] * num_packs
    pack, position = [0] * len(weight), [0] * len(weight)
    total, items = [0.0] * num_packs, [0] * num_packs
    for item in sorted(range(len(weight)), key=lambda i: -weight[i]):
        lightest = min((p for p in range(num_packs) if items[p] < per_pack), key=total.__getitem__)
        pack[item], position[item] = lightest, items[lightest]
        total[lightest] += weight[item]
        items[lightest] += 1
    return pack, position


def _pack_compiled(weight: list[float], num_packs: int) -> tuple[list[int], list[int]]:
    """`_pack` through the compiled kernel."""
    array = np.array(weight)
    pack, position = _pack_kernel(array, np.argsort(-array, kind="stable"), num_packs)
    return pack.tolist(), position.tolist()


@njit(cache=True, nogil=True)
def _pack_kernel(weight, order, num_packs):  # type: ignore[no-untyped-def]
    """Items in `order` to the lightest pack with room; twin of `_pack`."""
    per_pack = weight.size // num_packs
    pack = np.zeros(weight.size, np.int64)
    position = np.zeros(weight.size, np.int64)
    if per_pack == 1:
        for item in range(num_packs):
            pack[item] = item
        return pack, position
    total = np.zeros(num_packs)
    items = np.zeros(num_packs, np.int64)
    for item in order:
        lightest = -1
        for p in range(num_packs):
            if items[p] < per_pack and (lightest < 0 or total[p] < total[lightest]):
                lightest = p
        pack[item] = lightest
        position[item] = items[lightest]
        total[lightest] += weight[item]
        items[lightest] += 1
    return pack, position
