"""slime's rule for which samples an optimizer step trains, and plans in slime's schedule format.

Peer: `build_dp_schedule` (slime/utils/dp_schedule.py): samples of one rollout id stay in one step,
a step holds `global_batch_size` rollout ids in order of first appearance, trailing ids are dropped.
It returns (partitions, micro_batch_indices, num_microbatches, global_batch_sizes).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.rows import Rows

SlimeSchedule = tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]


def split_steps(rollout_ids: Sequence[int], global_batch_size: int) -> list[np.ndarray]:
    """Positions of the samples of each optimizer step, int64, siblings of a rollout together.

    rollout_ids: `[sample]`. Raises ValueError when there are fewer ids than one step needs.
    """
    members: dict[int, list[int]] = {}
    for position, rollout_id in enumerate(rollout_ids):
        members.setdefault(rollout_id, []).append(position)
    ids = list(members)
    num_steps = len(ids) // global_batch_size
    if num_steps < 1:
        raise ValueError(
            f"{len(ids)} rollouts are fewer than one optimizer step: lower --global-batch-size "
            f"(now {global_batch_size}) or raise --rollout-batch-size x --n-samples-per-prompt"
        )
    return [
        np.array(
            [
                p
                for i in ids[s * global_batch_size : (s + 1) * global_batch_size]
                for p in members[i]
            ]
        )
        for s in range(num_steps)
    ]


def to_slime_schedule(
    steps: Sequence[np.ndarray], rows: Sequence[Rows], rollout_ids: Sequence[int]
) -> SlimeSchedule:
    """The rows of every step as slime hands them to the ranks.

    steps: positions of each step's trajectories; rows: one assignment a step, in the same order.
    Rank d runs row k's cell (k, d) as its k-th micro-batch, so all ranks run equally many.
    """
    num_slots = rows[0].num_dp_slots
    partitions: list[list[int]] = [[] for _ in range(num_slots)]
    micro_batches: list[list[list[int]]] = [[] for _ in range(num_slots)]
    num_rollouts = []
    for positions, assignment in zip(steps, rows, strict=True):
        for slot in range(num_slots):
            for row in range(assignment.num_rows):
                members = positions[assignment.trajectories(row, slot)]
                first = len(partitions[slot])
                partitions[slot].extend(int(p) for p in members)
                micro_batches[slot].append(list(range(first, first + len(members))))
        kept = positions[assignment.kept]
        num_rollouts.append(len({rollout_ids[int(p)] for p in kept}))
    return partitions, micro_batches, [r.num_rows for r in rows], num_rollouts


def from_slime_schedule(schedule: SlimeSchedule, steps: Sequence[np.ndarray]) -> list[Rows]:
    """The rows of every step, read back from a schedule that slime made."""
    partitions, micro_batches, num_rows, _ = schedule
    num_slots = len(partitions)
    found, first = [], 0
    for positions, count in zip(steps, num_rows, strict=True):
        index = {int(p): i for i, p in enumerate(positions)}
        cell = np.full(len(positions), -1, np.int32)
        for slot in range(num_slots):
            for row, members in enumerate(micro_batches[slot][first : first + count]):
                for member in members:
                    cell[index[partitions[slot][member]]] = row * num_slots + slot
        found.append(Rows(cell=cell, num_rows=count, num_dp_slots=num_slots))
        first += count
    return found
