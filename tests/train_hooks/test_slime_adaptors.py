"""Names, topology and routing of slime's actors, without slime."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from planner.placement import Placement


@dataclass(frozen=True)
class Info:
    name: str
    src_rank: int


def test_names_become_logical_in_decoder_layers_only():
    from train_hooks.slime_names import logical_name

    head = "module.module.decoder.layers.1.mlp.experts.linear_fc1.weight"
    order = {1: [2, 0, 3, 1]}
    assert [logical_name(f"{head}{s}", order) for s in range(4)] == [f"{head}{e}" for e in order[1]]
    for same in (
        "module.module.decoder.layers.0.mlp.experts.linear_fc1.weight2",
        "module.module.mtp.layers.1.transformer_layer.mlp.experts.linear_fc1.weight2",
        "module.module.decoder.layers.1.mlp.router.weight",
        "module.module.decoder.layers.1.mlp.shared_experts.linear_fc1.weight",
    ):
        assert logical_name(same, order) == same


def test_cached_infos_name_the_rank_that_holds_the_logical_expert():
    from train_hooks.slime_buckets import relocated_infos

    head = "module.module.decoder.layers.1.mlp.experts.linear_fc2.weight"
    identity = [[Info(f"{head}{e}", e // 2) for e in range(4)] + [Info("embedding", 0)]]
    placement = Placement(expert_of_slot=np.array([[2, 1, 0, 3]]), num_ep_ranks=2, version=1)
    moved = relocated_infos(identity, placement, (1,))[0]
    assert [info.src_rank for info in moved] == [1, 0, 0, 1, 0]


def test_several_moves_between_two_syncs_rebuild_the_transfer_plan_once():
    from train_hooks.slime_buckets import ColocatedBuckets

    head = "module.module.decoder.layers.1.mlp.experts.linear_fc2.weight"
    built, sent = [], []

    def configure(**arguments):
        built.append([info.src_rank for info in arguments["full_param_info_buckets"][0]])
        return "rest", "plan"

    updater = SimpleNamespace(
        _full_param_info_buckets=((*(Info(f"{head}{e}", e // 2) for e in range(4)),),),
        connect_rollout_engines=lambda *unused, **engines: None,
        update_weights=lambda: sent.append("weights"),
        _hf_weight_iterator=SimpleNamespace(),
        rollout_engines=["engine"],
        args=SimpleNamespace(rollout_num_gpus_per_engine=2),
        weights_getter=dict,
        use_distribute=False,
    )
    buckets = ColocatedBuckets(updater, configure)
    updater.connect_rollout_engines(["engine"], None)
    for order in ([1, 0, 2, 3], [3, 1, 2, 0], [2, 1, 0, 3]):
        row = np.array([order], dtype=np.int32)
        buckets.follow(Placement(expert_of_slot=row, num_ep_ranks=2, version=1), (1,))
    assert built == []
    updater.update_weights()
    updater.update_weights()
    assert built == [[1, 0, 0, 1]] and sent == ["weights"] * 2
    assert updater._expert_transfer_plan == "plan"


def test_topology_comes_from_the_groups_that_exist():
    from train_hooks.slime_topology import RankRecord, topology_from_ranks

    sizes = dict(capacity=100, pp=1, vpp=1, microbatch_group=1, gpus_per_node=8)

    def ranks(world, ep, slot_of):
        return [
            RankRecord(
                rank=r,
                dp_slot=slot_of(r),
                pp_rank=0,
                ep_group=tuple(range(r // ep * ep, r // ep * ep + ep)),
            )
            for r in range(world)
        ]

    # TP 4, EP 8, D 2 on 8 GPUs (Qwen3-30B-A3B): one EP group over both slots
    one = topology_from_ranks(ranks(8, 8, lambda r: r // 4), tp=4, cp=1, **sizes)
    assert one.edp_shards == ((0, 1),) and one.ep_groups_per_shard == 1 and one.num_ep_ranks == 8
    # TP 4, CP 2, EP 4, D 2 on 16 GPUs: each slot's tokens over two EP groups
    two = topology_from_ranks(ranks(16, 4, lambda r: r // 8), tp=4, cp=2, **sizes)
    assert two.edp_shards == ((0,), (1,)) and two.ep_groups_per_shard == 2
    # EP 16 over two nodes of 8
    wide = topology_from_ranks(ranks(16, 16, lambda r: r), tp=1, cp=1, **sizes)
    assert wide.ranks_per_node == 8
    with pytest.raises(ValueError, match="--expert-model-parallel-size"):
        topology_from_ranks(ranks(12, 6, lambda r: r // 4), tp=4, cp=1, **sizes)


def test_routing_is_widened_only_when_it_is_read():
    torch = pytest.importorskip("torch")
    from train_hooks.slime_replay import own_routing

    store = {i: np.full((3, 2, 2), i, np.uint8) for i in range(4)}
    mine = own_routing([0, 1, 2, 3], [2, 0], lambda refs: [store[r] for r in refs])
    assert len(mine) == 2 and mine[0].dtype == torch.int32 and int(mine[0][0, 0, 0]) == 2
    assert [int(t[0, 0, 0]) for t in mine] == [2, 0]
    assert list.__getitem__(mine, 0).dtype == np.uint8
