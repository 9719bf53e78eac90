"""The parallel layout that a plan must fit: DP slots, EDP shards, EP ranks, caps, pipeline."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """What the planner must know of the job's process groups (Sections 2.1 and 3.1).

    Raises ValueError on a partition that misses or repeats a DP slot, or a size below 1.
    """

    edp_shards: tuple[tuple[int, ...], ...]
    """DP slots of each EDP shard (they share one EP communicator): a partition of 0..D-1."""
    num_ep_ranks: int
    """EP ranks (P) that share the experts of a layer."""
    capacity: int
    """Tokens that one cell may hold (C = max_tokens_per_gpu x CP size)."""
    pp: int = 1
    """Pipeline stages."""
    vpp: int = 1
    """Virtual pipeline chunks of a stage; above 1 the schedule is interleaved."""
    microbatch_group: int = 1
    """Rows come in multiples of this when vpp > 1 (microbatch_group_size_per_vp_stage)."""
    tp: int = 1
    cp: int = 1
    ep_groups_per_shard: int = 1
    """EP groups that share the tokens of the same slots (TP, CP or ETP split them): each carries
    this fraction of the shard's expert load."""
    ranks_per_node: int | None = None
    """EP ranks that share one node; None when moves cost the same everywhere."""

    def __post_init__(self) -> None:
        shards = tuple(tuple(int(slot) for slot in shard) for shard in self.edp_shards)
        object.__setattr__(self, "edp_shards", shards)
        slots = sorted(slot for shard in shards for slot in shard)
        if not slots or slots != list(range(len(slots))) or not all(shards):
            raise ValueError(
                f"Topology.edp_shards: got {shards}, expected every DP slot 0..D-1 in exactly one "
                "non-empty shard"
            )
        for name in (
            "num_ep_ranks",
            "capacity",
            "pp",
            "vpp",
            "microbatch_group",
            "tp",
            "cp",
            "ep_groups_per_shard",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"Topology.{name}: got {getattr(self, name)}, expected at least 1")
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise ValueError(
                f"Topology.ranks_per_node: got {self.ranks_per_node}, expected at least 1 or None"
            )

    @classmethod
    def uniform(
        cls, *, dp: int, ep: int, capacity: int, edp: int = 1, **more: int | None
    ) -> Topology:
        """`edp` shards of equal size over consecutive DP slots.

        Raises ValueError when `dp` is not a multiple of `edp`; `more` are the remaining fields.
        """
        if dp < 1 or edp < 1 or dp % edp:
            raise ValueError(
                f"Topology.uniform: dp {dp} is not a positive multiple of edp {edp}; name the "
                "shards of an uneven partition in edp_shards"
            )
        size = dp // edp
        shards = tuple(tuple(range(g * size, (g + 1) * size)) for g in range(edp))
        return cls(edp_shards=shards, num_ep_ranks=ep, capacity=capacity, **more)  # type: ignore[arg-type]

    @property
    def num_dp_slots(self) -> int:
        return sum(len(shard) for shard in self.edp_shards)

    @property
    def num_shards(self) -> int:
        return len(self.edp_shards)

    @property
    def row_multiple(self) -> int:
        """The number of rows must be a multiple of this (the interleaved schedule's group)."""
        return self.microbatch_group if self.vpp > 1 else 1

    @property
    def shard_of_slot(self) -> np.ndarray:
        """[DP slot] index of the EDP shard that holds it."""
        shard = np.empty(self.num_dp_slots, np.int64)
        for g, slots in enumerate(self.edp_shards):
            shard[list(slots)] = g
        return shard
