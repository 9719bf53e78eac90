"""Jobs, samples and sealed rollouts of slime, as the adaptors read them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from app.slime.config import SlimeConfig
from app.slime.cost import cost_of_model
from app.slime.planning import RolloutPlanner
from planner.topology import Topology
from rollout_hooks.routed_experts import CaptureSpec
from rollout_hooks.slime_windows import SealedRollout


def job(**more) -> SimpleNamespace:
    """slime's namespace as the adaptors read it."""
    values = dict(
        routepack_policy="full",
        debug_rollout_only=False,
        num_experts=8,
        num_layers=3,
        moe_layer_freq=[0, 1, 1],
        moe_router_topk=2,
        hidden_size=64,
        ffn_hidden_size=128,
        moe_ffn_hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=16,
        tensor_model_parallel_size=1,
        context_parallel_size=1,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
        use_dynamic_batch_size=True,
        moe_grouped_gemm=True,
        use_rollout_routing_replay=True,
        rollout_sample_hook_path=["user.hook"],
        bf16=True,
        fp16=False,
    )
    return SimpleNamespace(**{**values, **more})


def sample(num_tokens=5, index=3, group=1, **more) -> SimpleNamespace:
    routed = np.tile(np.array([0, 1], np.int32), (num_tokens - 1, 3, 1))
    values = dict(
        index=index,
        group_index=group,
        tokens=list(range(num_tokens)),
        rollout_routed_experts=routed,
    )
    return SimpleNamespace(**{**values, **more})


def sealed(rollout_id=0, num=16, seed=0, unknown=()) -> SealedRollout:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(10, 60, num)
    demands = []
    for i, length in enumerate(lengths):
        counts = np.zeros((2, 8), np.int32)
        for layer in range(2):
            picks = [rng.choice(8, 2, False, [0.4, 0.3] + [0.05] * 6) for _ in range(length - 1)]
            np.add.at(counts[layer], np.concatenate(picks), 1)
        demands.append(None if i in unknown else counts)
    return SealedRollout(
        rollout_id=rollout_id,
        lengths=[int(x) for x in lengths],
        demands=demands,
        rollout_ids=list(range(num)),
        groups=[i // 4 for i in range(num)],
        spec=CaptureSpec(num_hidden_layers=3, moe_layers=(1, 2), num_experts=8, top_k=2),
        global_batch_size=8,
        parallel={},
        sealed_at=0.0,
    )


TOPOLOGY = Topology.uniform(dp=2, ep=2, capacity=128)


def rollout_planner(policy="full", calls=None, **planner) -> RolloutPlanner:
    config = SlimeConfig(
        planner=dict(stop="cv", budget_seconds=0.05, num_cores=1, **planner),  # type: ignore[arg-type]
        guard=dict(patience=0),  # type: ignore[arg-type]
    )
    return RolloutPlanner(
        policy=policy,
        config=config,
        cost=cost_of_model(job(), 128),
        options=config.options(shard_size=4, balance_data=False, bytes_per_expert=1024.0),
        calls=calls,
    )
