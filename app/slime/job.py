"""What the manager and the planner must know of the running job, collected from its train ranks."""

from __future__ import annotations

from typing import Any


def job_facts(args: Any, parallel: dict) -> dict[str, Any]:
    """The topology, from the process groups of all ranks; collective over the world.

    parallel: slime's train_parallel_config of this rank (dp_size, cp_size, vpp_size, ...).
    """
    import torch.distributed as dist
    from megatron.core import mpu
    from slime.utils.distributed_utils import get_gloo_group

    from train_hooks.slime_topology import describe_rank, topology_from_ranks

    records: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(records, describe_rank(), group=get_gloo_group())
    topology = topology_from_ranks(
        records,
        capacity=args.max_tokens_per_gpu * parallel["cp_size"],
        pp=mpu.get_pipeline_model_parallel_world_size(),
        vpp=parallel["vpp_size"],
        microbatch_group=parallel["microbatch_group_size_per_vp_stage"],
        tp=mpu.get_tensor_model_parallel_world_size(),
        cp=parallel["cp_size"],
        gpus_per_node=args.num_gpus_per_node,
    )
    return {"topology": topology}
