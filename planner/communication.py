"""Expert-parallel traffic: assignments, and DeepEP's rank-deduplicated copies (Section 6.1).

DeepEP sends a token once to each destination rank, however many of its experts live there. The
fan-out needs token-level routing and depends on the placement. Both kinds of copies are additive
over trajectories, so they can be reported for any rows and enter the search as a term.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np

from planner.placement import Placement
from planner.rows import Rows
from planner.topology import Topology


@numba.njit(cache=True, nogil=True)
def _fan_out(routed_experts, starts, owner, result):
    num_ranks = result.shape[2]
    seen = np.full(num_ranks, -1, np.int64)
    for trajectory in range(starts.shape[0] - 1):
        for token in range(starts[trajectory], starts[trajectory + 1]):
            for layer in range(routed_experts.shape[1]):
                stamp = token * routed_experts.shape[1] + layer
                for k in range(routed_experts.shape[2]):
                    rank = owner[layer, routed_experts[token, layer, k]]
                    if seen[rank] != stamp:
                        seen[rank] = stamp
                        result[trajectory, layer, rank] += 1


def fan_out(routed_experts: np.ndarray, starts: np.ndarray, placement: Placement) -> np.ndarray:
    """Token copies [trajectory, layer, EP rank], int32: tokens with at least one expert on the
    rank.

    Args: routed_experts [token, layer, top_k] logical ids; starts [trajectory + 1] first token of
    each trajectory. Raises ValueError on an id outside the experts.
    """
    if routed_experts.size and not 0 <= routed_experts.min() <= routed_experts.max() < (
        placement.num_experts
    ):
        raise ValueError(
            f"routed_experts: ids {routed_experts.min()}..{routed_experts.max()} lie outside the "
            f"{placement.num_experts} experts of the placement"
        )
    shape = (len(starts) - 1, placement.num_layers, placement.num_ep_ranks)
    result = np.zeros(shape, np.int32)
    _fan_out(routed_experts, np.asarray(starts, np.int64), placement.owner, result)
    return result


def fan_out_reference(
    routed_experts: np.ndarray, starts: np.ndarray, placement: Placement
) -> np.ndarray:
    """Plain numpy twin of `fan_out`."""
    layers = np.arange(placement.num_layers)[None, :, None]
    ranks = placement.owner[layers, routed_experts]
    reached = (ranks[..., None] == np.arange(placement.num_ep_ranks)).any(axis=2)
    sums = np.concatenate([np.zeros_like(reached[:1], np.int64), np.cumsum(reached, axis=0)])
    return (sums[starts[1:]] - sums[starts[:-1]]).astype(np.int32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Off-rank copies of a window's rows, per Equation 19."""

    remote: float
    """V summed over rows and layers: copies that leave their rank."""
    peak: float
    """m summed over rows and layers: the busiest endpoint, the larger of sent and received."""
    num_ranks: int

    @property
    def rho(self) -> float:
        """Peak over mean endpoint traffic; 1 when all endpoints carry the same."""
        return self.num_ranks * self.peak / self.remote if self.remote else 1.0

    @property
    def efficiency(self) -> float:
        """Peak-weighted endpoint efficiency, 1 / rho."""
        return 1.0 / self.rho


def slot_share(num_slots: int, num_ranks: int) -> np.ndarray:
    """[slot of a shard, EP rank] share of the slot's tokens that start on the rank.

    A shard's EP ranks are divided over its slots in order: one each when their numbers agree,
    several ranks (TP, CP) or several slots to one otherwise.
    """
    share = np.zeros((num_slots, num_ranks))
    for slot in range(num_slots):
        first = slot * num_ranks // num_slots
        last = max(first + 1, (slot + 1) * num_ranks // num_slots)
        share[slot, first:last] = 1.0 / (last - first)
    return share


def traffic(copies: np.ndarray, rows: Rows, topology: Topology) -> Traffic:
    """The traffic of copies [trajectory, layer, EP rank] (q, or `fan_out`) over rows."""
    num_layers, num_ranks = copies.shape[1:]
    remote = peak = 0.0
    for slots in topology.edp_shards:
        share = slot_share(len(slots), num_ranks)
        for row in range(rows.num_rows):
            cells = np.zeros((len(slots), num_layers, num_ranks), np.int64)
            for k, slot in enumerate(slots):
                cells[k] = copies[rows.trajectories(row, slot)].sum(axis=0)
            pairs = np.einsum("kr,klp->lrp", share, cells)
            local = np.einsum("lrr->lr", pairs)
            sent = pairs.sum(axis=2) - local
            received = pairs.sum(axis=1) - local
            remote += sent.sum()
            peak += np.maximum(sent, received).max(axis=1).sum()
    return Traffic(
        remote=remote / topology.ep_groups_per_shard,
        peak=peak / topology.ep_groups_per_shard,
        num_ranks=num_ranks,
    )
