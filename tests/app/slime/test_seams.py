"""Flags that RoutePack needs, and the seams that it relies on."""

from __future__ import annotations

import pytest
from slime_cases import job

from app.slime.flags import HOOK_PATH, UnsupportedJob, prepare_arguments
from app.slime.seams import Seam, SeamError, check, with_globals
from rollout_hooks.slime_steps import split_steps


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
        (
            dict(
                deterministic_mode=True,
                moe_enable_deepep=True,
                megatron_deepgemm_moe_forward_layers=[1, 2],
            ),
            "--deterministic-mode with --megatron-deepgemm-moe-forward-layers",
        ),
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
