"""The adaptors' logic on recorded call shapes; slime is not needed."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from app.slime.config import SlimeConfig
from app.slime.cost import bytes_per_expert, cost_of_model
from app.slime.flags import HOOK_PATH, UnsupportedJob, prepare_arguments
from app.slime.guard import Guard
from app.slime.planning import RolloutPlanner
from app.slime.seams import Seam, SeamError, check, with_globals
from planner.placement import Placement
from planner.rows import Rows
from planner.topology import Topology
from rollout_hooks.admission import PlannerCalls
from rollout_hooks.routed_experts import CaptureError, CaptureSpec, encode
from rollout_hooks.slime_capture import capture, demand_of_samples, narrow_type
from rollout_hooks.slime_probe import check_capture
from rollout_hooks.slime_steps import from_slime_schedule, split_steps, to_slime_schedule
from rollout_hooks.slime_windows import SealedRollout, windows_of


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


# --- steps and schedules ---------------------------------------------------------------------


def test_siblings_of_a_rollout_stay_in_one_step_and_trailing_rollouts_are_dropped():
    steps = split_steps([7, 8, 7, 9, 10, 11], global_batch_size=2)
    assert [list(step) for step in steps] == [[0, 2, 1], [3, 4]]


def test_too_few_rollouts_name_the_flag():
    with pytest.raises(ValueError, match="--global-batch-size"):
        split_steps([0, 1], global_batch_size=3)


def test_rows_become_slimes_schedule_and_come_back():
    rng = np.random.default_rng(0)
    steps = split_steps(list(range(12)), 6)
    rows = [
        Rows(
            cell=np.array(rng.permutation([0, 1, 2, 3, 0, 3]), np.int32), num_rows=2, num_dp_slots=2
        )
        for _ in steps
    ]
    schedule = to_slime_schedule(steps, rows, list(range(12)))
    partitions, micro_batches, num_rows, sizes = schedule
    assert num_rows == [2, 2] and sizes == [6, 6]
    assert sorted(p for part in partitions for p in part) == list(range(12))
    for part, batches in zip(partitions, micro_batches):
        assert [i for batch in batches for i in batch] == list(range(len(part)))
        assert len(batches) == 4
    assert all((a.cell == b.cell).all() for a, b in zip(from_slime_schedule(schedule, steps), rows))


def test_a_dropped_trajectory_lowers_the_number_of_rollouts_of_its_step():
    steps = split_steps([0, 1, 2], 3)
    rows = Rows(cell=np.array([0, 1, -1], np.int32), num_rows=1, num_dp_slots=2)
    assert to_slime_schedule(steps, [rows], [0, 1, 2])[3] == [2]


# --- capture ---------------------------------------------------------------------------------


def test_capture_counts_moe_layers_and_keeps_narrow_routing_of_all_layers():
    s = sample()
    capture(job(), s)
    assert s.rollout_routed_experts.dtype == np.uint8
    assert s.rollout_routed_experts.shape == (4, 3, 2)
    assert (s.rollout_routed_experts[:, 0] == 0).all()  # the dense layer
    assert s.routepack_counts.tolist() == [[4, 4, 0, 0, 0, 0, 0, 0]] * 2
    again = s.rollout_routed_experts
    capture(job(), s)
    assert s.rollout_routed_experts is again


@pytest.mark.parametrize(("experts", "dtype"), [(256, "uint8"), (257, "int16"), (512, "int16")])
def test_the_kept_type_is_one_that_torch_can_hold(experts, dtype):
    assert narrow_type(experts) == np.dtype(dtype)


@pytest.mark.parametrize("bad", [9, -1])
def test_an_impossible_capture_names_the_sample(bad):
    s = sample()
    s.rollout_routed_experts[2, 1, 0] = bad
    with pytest.raises(CaptureError, match=r"sample 3 \(group 1\)"):
        capture(job(), s)


def test_rows_that_contradict_the_tokens_are_refused():
    s = sample()
    s.tokens = list(range(9))
    with pytest.raises(CaptureError, match="9 tokens"):
        capture(job(), s)


def test_a_missing_capture_is_an_error_that_names_the_flag_or_an_estimate():
    samples = [sample(), sample(index=4, rollout_routed_experts=None)]
    with pytest.raises(CaptureError, match="--use-rollout-routing-replay"):
        demand_of_samples(job(), samples, "error")
    demand, groups = demand_of_samples(job(), samples, "estimate")
    assert demand[0] is not None and demand[1] is None and groups == [1, 1]


def test_an_impossible_capture_is_estimated_only_where_nothing_replays_it():
    def broken():
        s = sample()
        s.rollout_routed_experts[0, 1, 0] = 99
        return s

    with pytest.raises(CaptureError):
        demand_of_samples(job(), [broken()], "estimate")
    demand, _ = demand_of_samples(job(use_rollout_routing_replay=False), [broken()], "estimate")
    assert demand == [None]


def test_the_start_up_check_says_what_to_install_when_the_router_drops_the_field():
    spec = CaptureSpec(num_hidden_layers=3, moe_layers=(1, 2), num_experts=8, top_k=2)
    asked = []

    def server(routed):
        def post(url, payload):
            asked.append(payload)
            return {"meta_info": {} if routed is None else {"routed_experts": encode(routed)}}

        return post

    url = "http://127.0.0.1:1/generate"
    assert check_capture(url, spec, "error", server(np.zeros((4, 3, 2), np.int32)))
    assert asked[0]["return_routed_experts"] is True
    with pytest.raises(CaptureError, match="PyPI"):
        check_capture(url, spec, "error", server(None))
    assert not check_capture(url, spec, "estimate", server(None))
    with pytest.raises(CaptureError, match="bytes"):
        check_capture(url, spec, "estimate", server(np.zeros((4, 2, 2), np.int32)))


# --- flags, seams ----------------------------------------------------------------------------


def test_the_capture_hook_runs_behind_the_users_own():
    args = job()
    prepare_arguments(args)
    prepare_arguments(args)
    assert args.rollout_sample_hook_path == ["user.hook", HOOK_PATH]


def test_off_leaves_the_arguments_alone():
    args = job(routepack_policy="off", num_experts=None)
    prepare_arguments(args)
    assert args.rollout_sample_hook_path == ["user.hook"]


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        (dict(num_experts=None), "--num-experts"),
        (dict(use_dynamic_batch_size=False), "--use-dynamic-batch-size"),
        (dict(balance_by_flops=True), "--balance-by-flops"),
        (dict(expert_model_parallel_size=1), "--expert-model-parallel-size"),
        (dict(expert_tensor_parallel_size=2), "--expert-tensor-parallel-size"),
        (dict(moe_grouped_gemm=False), "--moe-grouped-gemm"),
        (dict(moe_router_fusion=True), "--moe-router-fusion"),
    ],
)
def test_an_unsupported_job_names_the_flag_to_change(change, flag):
    with pytest.raises(UnsupportedJob, match=flag):
        prepare_arguments(job(**change))


def test_a_renamed_or_changed_seam_is_refused_by_name():
    here = "app.slime.clock"
    check([Seam(module=here, name="table_10", parameters=("marks",), uses=("placed_at",))])
    for seam, words in (
        (Seam(module=here, name="table_11"), "table_11 is not there"),
        (Seam(module=here, name="table_10", parameters=("a",)), "takes"),
        (Seam(module=here, name="table_10", uses=("nothing",)), "no longer uses"),
        (Seam(module="app.slime.no_such_module", name="x"), "is not there"),
    ):
        with pytest.raises(SeamError, match=words):
            check([seam])


def test_with_globals_changes_what_a_copy_sees_and_nothing_else():
    def outer():
        return split_steps  # a global of this module

    assert with_globals(outer, split_steps=1)() == 1
    assert outer() is split_steps


# --- planning --------------------------------------------------------------------------------


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


def test_one_placement_a_rollout_and_rows_of_its_own_for_every_step():
    planner = rollout_planner()
    opened = planner.place(sealed(), TOPOLOGY)
    joined = planner.join(0)
    assert len(joined.plans) == 2
    assert all(plan.placement is joined.plans[0].placement for plan in joined.plans)
    assert opened.placement.version == 1 and joined.fallback is None
    assert {plan.window_id for plan in joined.plans} == {0, 1}
    report = planner.report(0)
    assert report.figures["place/planned_moves"] > 0
    assert report.figures["plan/saving_over_slime"] > 0
    assert report.loads[1].max() < report.loads[0].max()


def test_plans_chain_from_the_last_emitted_placement_without_waiting_for_training():
    planner = rollout_planner()
    first = planner.place(sealed(0), TOPOLOGY)
    second = planner.place(sealed(1, seed=9), TOPOLOGY)  # asynchronous: before join(0)
    assert second.carried is first.placement
    assert planner.join(0).plans[0].layout_version == 0
    assert planner.join(1).plans[0].layout_version == first.placement.version


@pytest.mark.parametrize("policy", ["observe", "base", "reschedule"])
def test_policies_without_moves_never_emit_another_placement(policy):
    planner = rollout_planner(policy)
    opened = planner.place(sealed(), TOPOLOGY)
    assert opened.placement.version == 0
    planned = planner.join(0).plans[0].placement.version
    assert planned == (1 if policy == "observe" else 0)


def test_without_any_capture_the_next_rollout_is_planned_on_what_was_executed():
    planner = rollout_planner()
    planner.place(sealed(0, unknown=range(16)), TOPOLOGY)
    executed = np.tile(np.array([60, 50, 40, 30, 5, 5, 5, 5]), (2, 1))
    figures = planner.report(0, executed).figures
    # planned on uniform demand, so nothing moved and ranks got 180 against 20 tokens
    assert figures["capture/executed_excess"] == pytest.approx(0.8)
    assert 0.7 < figures["capture/regret"] <= 0.8
    assert planner.place(sealed(1, unknown=range(16)), TOPOLOGY).placement.version == 1
    again = planner.report(1, executed).figures
    assert again["capture/regret"] < 0.1


def test_nothing_moves_while_only_the_critic_trains():
    planner = rollout_planner()
    opened = planner.place(sealed(), TOPOLOGY, may_move=False)
    assert opened.policy == "reschedule" and opened.placement.version == 0
    assert planner.place(sealed(1), TOPOLOGY).placement.version == 1


def test_a_planner_that_raises_falls_back_on_all_steps():
    def broken(*args):
        raise RuntimeError("injected")

    planner = rollout_planner(calls=PlannerCalls(place=broken))
    opened = planner.place(sealed(), TOPOLOGY)
    joined = planner.join(0)
    assert "injected" in joined.fallback
    assert opened.placement.version == 0 and len(joined.rows) == 2


def test_unknown_demand_is_estimated_from_earlier_rollouts():
    planner = rollout_planner()
    planner.place(sealed(0), TOPOLOGY)
    planner.join(0)
    planner.place(sealed(1, unknown=range(16)), TOPOLOGY)
    assert planner.report(1).figures["plan/capture_coverage"] == 0.0
    whole, steps, positions = windows_of(sealed(2, unknown=[3]), planner.shares)
    assert whole.estimated.sum() == 1 and len(steps) == len(positions) == 2
    assert whole.demand[3].sum() == 2 * 2 * (whole.length[3] - 1)


# --- guard, clock, layout, configuration -----------------------------------------------------


def test_the_guard_steps_down_after_losing_windows_in_a_row():
    guard = Guard(policy="full", patience=2, calibration_windows=2)
    assert guard.effective == "observe"
    for _ in range(2):
        guard.measured("observe", slime_cost=10.0, seconds=20.0, exposed=0.0)
    assert guard.effective == "full" and guard.seconds_per_cost == 2.0
    assert not guard.measured("full", 10.0, 25.0, 0.0)
    assert not guard.measured("full", 10.0, 15.0, 0.0)  # a win starts the count again
    assert not guard.measured("full", 10.0, 25.0, 0.0)
    assert guard.measured("full", 10.0, 19.0, 3.0)  # exposed time counts
    assert guard.effective == "reschedule" and "full lost 2" in guard.message
    for _ in range(2):
        stepped = guard.measured("reschedule", 10.0, 30.0, 0.0)
    assert stepped and guard.effective == "observe"


def test_a_guard_that_is_off_never_changes_the_policy():
    guard = Guard(policy="full", patience=0)
    assert guard.effective == "full"
    assert not any(guard.measured("full", 1.0, 99.0, 0.0) for _ in range(9))


def test_experts_go_home_when_the_guard_says_so():
    planner = rollout_planner()
    moved = planner.place(sealed(0), TOPOLOGY).placement
    planner._go_home, planner.guard.policy = True, "observe"
    home = planner.place(sealed(1), TOPOLOGY).placement
    assert home.version == moved.version + 1
    assert (home.expert_of_slot == np.arange(8)).all()


def test_cost_shrinks_with_the_ranks_that_share_a_slot():
    one = cost_of_model(job(), 128)
    four = cost_of_model(job(tensor_model_parallel_size=2, context_parallel_size=2), 128)
    assert four.alpha == pytest.approx(one.alpha / 4)
    assert bytes_per_expert(job()) == 3 * 64 * 32 * (2 + 2 + 4 + 8)


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
