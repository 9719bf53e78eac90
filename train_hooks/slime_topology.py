"""The planner's topology, read from the process groups of the running slime job.

Every train actor reports itself (`describe_rank`); rank 0's collection becomes a Topology
(`topology_from_ranks`, pure). EP groups with the same DP slots form one EDP shard; where TP, CP or
ETP split a slot's tokens over several EP groups, each carries an equal share of the shard's load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.topology import Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRecord:
    """One train rank: where it sits, and the global ranks of its EP group in EP order."""

    rank: int
    dp_slot: int
    pp_rank: int
    ep_group: tuple[int, ...]


def describe_rank() -> RankRecord:
    """This rank's record, from Megatron's process groups."""
    import torch.distributed as dist
    from megatron.core import mpu

    return RankRecord(
        rank=dist.get_rank(),
        dp_slot=mpu.get_data_parallel_rank(with_context_parallel=False),
        pp_rank=mpu.get_pipeline_model_parallel_rank(),
        ep_group=tuple(dist.get_process_group_ranks(mpu.get_expert_model_parallel_group())),
    )


def topology_from_ranks(
    records: Sequence[RankRecord],
    *,
    capacity: int,
    pp: int,
    vpp: int,
    microbatch_group: int,
    tp: int,
    cp: int,
    gpus_per_node: int,
) -> Topology:
    """The topology of the first pipeline stage, which every stage shares.

    Raises ValueError when EP groups overlap in some DP slots but not in all: such a job has no EDP
    shards that a row can be scored on.
    """
    stage = {r.rank: r for r in records if r.pp_rank == 0}
    groups = sorted({r.ep_group for r in stage.values()})
    slots_of = {g: tuple(sorted({stage[rank].dp_slot for rank in g})) for g in groups}
    shards = sorted(set(slots_of.values()))
    flat = sorted(slot for shard in shards for slot in shard)
    if flat != list(range(len(flat))):
        raise ValueError(
            f"EP groups cover the DP slots {shards}, which overlap in part: choose "
            "--expert-model-parallel-size so that it divides, or is a multiple of, TP x CP x ETP "
            "ranks of whole DP slots"
        )
    counts = {shard: sum(slots_of[g] == shard for g in groups) for shard in shards}
    if len(set(counts.values())) != 1:
        raise ValueError(f"EDP shards own different numbers of EP groups: {counts}")
    return Topology(
        edp_shards=tuple(shards),
        num_ep_ranks=len(groups[0]),
        capacity=capacity,
        pp=pp,
        vpp=vpp,
        microbatch_group=microbatch_group,
        tp=tp,
        cp=cp,
        ep_groups_per_shard=next(iter(counts.values())),
        ranks_per_node=_ranks_per_node(groups[0], gpus_per_node),
    )


def _ranks_per_node(ep_group: tuple[int, ...], gpus_per_node: int) -> int | None:
    """EP ranks that share a node, None when all do or nodes hold different numbers."""
    nodes = [rank // gpus_per_node for rank in ep_group]
    counts = {nodes.count(node) for node in nodes}
    if len(set(nodes)) == 1 or len(counts) != 1:
        return None
    per_node = counts.pop()
    return (
        per_node
        if nodes == [node for node in dict.fromkeys(nodes) for _ in range(per_node)]
        else None
    )
