"""Layer-wise expert placement: the permutation of logical experts over physical slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Placement:
    """Which logical expert sits in which slot of every MoE layer (pi_l, Section 3.2).

    Slot s lives on EP rank s // (E / P). Raises ValueError when E is not divisible by P, or a
    layer is not a permutation of the experts.
    """

    expert_of_slot: np.ndarray
    """[layer, slot] logical expert, int32."""
    num_ep_ranks: int
    version: int = 0
    """Layout version; a plan that moves experts raises it by one."""

    def __post_init__(self) -> None:
        experts = np.array(self.expert_of_slot)
        if experts.ndim != 2 or experts.dtype.kind not in "iu":
            raise ValueError(
                f"Placement.expert_of_slot: got {experts.dtype} of shape {experts.shape}, expected "
                "integers of shape [layer, slot]"
            )
        num_experts = experts.shape[1]
        if self.num_ep_ranks < 1 or num_experts == 0 or num_experts % self.num_ep_ranks:
            raise ValueError(
                f"Placement: {num_experts} experts cannot be split evenly over num_ep_ranks="
                f"{self.num_ep_ranks}; choose an EP size that divides the number of experts"
            )
        inside = (experts >= 0) & (experts < num_experts)
        seen = np.zeros(experts.shape, np.bool_)
        np.put_along_axis(seen, np.where(inside, experts, 0).astype(np.int64), True, axis=1)
        wrong = ~(inside & seen).all(axis=1)
        if wrong.any():
            layer = int(np.flatnonzero(wrong)[0])
            raise ValueError(
                f"Placement.expert_of_slot: layer {layer} is not a permutation of 0.."
                f"{num_experts - 1} (an expert is missing or sits in two slots): {experts[layer]}"
            )
        experts = experts.astype(np.int32)
        experts.setflags(write=False)
        object.__setattr__(self, "expert_of_slot", experts)

    @classmethod
    def identity(cls, num_layers: int, num_experts: int, num_ep_ranks: int) -> Placement:
        """Expert e in slot e of every layer: where training starts."""
        slots = np.tile(np.arange(num_experts, dtype=np.int32), (num_layers, 1))
        return cls(expert_of_slot=slots, num_ep_ranks=num_ep_ranks)

    @property
    def num_layers(self) -> int:
        return self.expert_of_slot.shape[0]

    @property
    def num_experts(self) -> int:
        return self.expert_of_slot.shape[1]

    @property
    def experts_per_rank(self) -> int:
        return self.num_experts // self.num_ep_ranks

    @property
    def slot_of_expert(self) -> np.ndarray:
        """[layer, logical expert] slot, int32."""
        slots = np.empty_like(self.expert_of_slot)
        numbers = np.arange(self.num_experts, dtype=np.int32)
        np.put_along_axis(slots, self.expert_of_slot.astype(np.int64), numbers[None], axis=1)
        return slots

    @property
    def owner(self) -> np.ndarray:
        """[layer, logical expert] EP rank that holds the expert, int32."""
        return self.slot_of_expert // np.int32(self.experts_per_rank)

    def num_moved(self, other: Placement) -> int:
        """Experts, over all layers, that sit in different slots in the two placements."""
        if self.expert_of_slot.shape != other.expert_of_slot.shape:
            raise ValueError(
                f"Placement.num_moved: shapes {self.expert_of_slot.shape} and "
                f"{other.expert_of_slot.shape} differ"
            )
        return int((self.expert_of_slot != other.expert_of_slot).sum())

    def with_owner(self, owner: np.ndarray) -> Placement:
        """The placement with the given EP rank per logical expert, moving as few slots as possible.

        Args: owner: [layer, logical expert] EP rank. Experts that stay on their rank keep their
        slots; incoming experts fill vacated slots in ascending order (Section 3.2). The version is
        raised by one if anything moved. Raises ValueError if a rank would get too many experts.
        """
        slot_of_expert = self.slot_of_expert
        before = slot_of_expert // np.int32(self.experts_per_rank)
        if owner.shape != before.shape:
            raise ValueError(f"owner: got shape {owner.shape}, expected {before.shape}")
        layer, moving = np.nonzero(owner != before)
        if not len(layer):
            return self
        by_owner = np.lexsort((owner[layer, moving], layer))
        by_slot = np.lexsort((slot_of_expert[layer, moving], layer))
        incoming, vacated = moving[by_owner], slot_of_expert[layer, moving[by_slot]]
        wrong = owner[layer, incoming] != vacated // self.experts_per_rank
        if wrong.any():
            raise ValueError(
                f"owner: layer {layer[np.argmax(wrong)]} does not give every EP rank "
                f"{self.experts_per_rank} experts"
            )
        experts = self.expert_of_slot.copy()
        experts[layer, vacated] = incoming
        return Placement(
            expert_of_slot=experts, num_ep_ranks=self.num_ep_ranks, version=self.version + 1
        )


def rank_load(expert_load: np.ndarray, placement: Placement) -> np.ndarray:
    """[layer, EP rank] routed tokens G_lp, from expert_load [layer, expert] (Equation 10)."""
    by_slot = np.take_along_axis(
        np.asarray(expert_load), placement.expert_of_slot.astype(np.int64), axis=1
    )
    num_layers = placement.num_layers
    return by_slot.reshape(num_layers, placement.num_ep_ranks, -1).sum(axis=2, dtype=np.int64)


def coefficient_of_variation(load: np.ndarray) -> np.ndarray:
    """[layer] standard deviation over mean of load [layer, EP rank]; 0 without load."""
    load = np.asarray(load, np.float64)
    mean = load.mean(axis=-1)
    return np.where(mean > 0, load.std(axis=-1) / np.where(mean > 0, mean, 1.0), 0.0)
