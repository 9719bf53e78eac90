"""A commit is prepared, then carried: nothing can fail for the first time once bytes move."""

from __future__ import annotations

import pytest
from train_hooks_ranks import two_phases

from app.bench.groups import groups_of_moves
from app.commands.verify_matrix import ranks
from app.local.ranks import run_ranks
from app.matrix.layouts import StateLayout

pytestmark = pytest.mark.ranks

EXECUTING = {  # beside the transport: seals and unseals, and one copy of the map a layer
    "layout.ExpertLayout.begin_change",
    "layout.ExpertLayout.finish_change",
    "layout.ExpertLayout._seal_all",
    "router_seam.RouterSeam.expert_of_slot",
    "expert_state.ExpertState.rebuild_derived",
}
C_CALLS = {"copy_", "send", "recv", "wait", "values", "items", "len"}


def test_between_begin_and_finish_only_prepared_transfers_and_copies_run():
    calls = run_ranks(two_phases.what_executing_calls, ranks(2))
    ours = {name for name in calls if not name.startswith("C ") and name != "torch"}
    unknown = {n for n in ours - EXECUTING if not n.startswith("transport.")}
    assert not unknown
    assert calls["transport.Carrier.cross"] > 3, "many chunks were watched"
    assert {n.split(".")[-1].removeprefix("C ") for n in calls if n.startswith("C ")} <= C_CALLS
    assert calls.get("torch", 0) <= 3, "one look at a buffer of each of three routers"


def test_memory_that_ends_on_one_rank_at_any_step_of_preparing_leaves_the_old_layout_training():
    result = run_ranks(two_phases.failures_while_preparing, ranks(2))
    assert len(result["said"]) >= 25, result["said"].keys()
    for name, (errors, moved) in result["said"].items():
        assert all(f"no memory left in {name}" in error for error in errors), (name, errors)
        assert all("rank 1" in error for error in errors), (name, errors)
        assert moved == 0, name
    assert result["loss_difference"] == 0


def test_an_interrupt_in_the_middle_names_what_to_restart_from():
    result = run_ranks(two_phases.interrupted, ranks(2))
    assert result["raised"] == "KeyboardInterrupt"
    assert "forward refused" in result["forward"]
    assert "restart from /checkpoints/7" in result["forward"]


def test_a_commit_gathers_only_parameters_whose_gather_is_pending():
    result = run_ranks(two_phases.parameter_gathers, ranks(2))
    assert result["expert, after a step"] == result["expert groups"] >= 2
    assert result["dense, after a step"] == 0
    assert result["expert, without one"] == result["dense, without one"] == 0


def test_state_on_the_host_crosses_once_when_pinned_and_twice_when_not():
    result = run_ranks(two_phases.host_bytes, ranks(2))
    # Two experts of 36x2 rows of 32 and 32 rows of 36, fp32, with two moments, trade places: each
    # rank sends one and receives one.
    one = 4 * 3 * (72 * 32 + 32 * 36)
    assert result["device"][:2] == (0, 0)
    assert result["pinned"][:2] == (2 * one, 2 * one)
    assert result["pageable"][:2] == (4 * one, 2 * one)
    # On a device one of the two is staged at each rank for every other tensor: half a copy a byte.
    assert result["device"][2] / result["device"][3] == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("bias_update_rate", [0.0, 1e-2], ids=["no bias update", "expert bias"])
@pytest.mark.parametrize(("world", "most"), [(2, 0), (4, 1)], ids=["EDP 1", "EDP 2"])
def test_a_commit_starts_no_communicator_that_training_does_not_use(world, most, bias_update_rate):
    shape = StateLayout(name="groups", world=world, bias_update_rate=bias_update_rate)
    assert run_ranks(groups_of_moves, ranks(world), shape) <= most
