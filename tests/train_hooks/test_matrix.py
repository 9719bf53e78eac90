"""Every supported layout of training state, moved on real ranks and compared bit for bit."""

from __future__ import annotations

import pytest

from app.commands.verify_matrix import of_world, ranks
from app.local.ranks import run_ranks
from app.matrix.layouts import RUN
from app.matrix.prove import prove_rank
from app.matrix.refusals import refusal_messages
from app.matrix.structures import STRUCTURES, prove_structure_rank

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("world", [2, 4])
def test_every_layout_moves_exactly_and_its_control_is_noticed(world):
    shapes = of_world(RUN, world)
    proofs = run_ranks(prove_rank, ranks(world), shapes)
    assert [p.name for p in proofs] == [s.name for s in shapes]
    for proof in proofs:
        assert proof.num_different == 0, proof
        assert proof.num_later == 0 and proof.loss_difference == 0, proof
        assert proof.noticed, proof
    tensors = {p.name: p.num_tensors for p in proofs}
    if world == 2:
        per_layer = 12 * 2  # experts x matrices
        assert tensors["EP 2, fp32"] == 3 * per_layer * 3
        assert tensors["EP 2, bf16 with fp32 main shards"] == 3 * per_layer * 4
        assert tensors["EP 2, optimizer without moments"] == 3 * per_layer * 2
        assert tensors["EP 2, frozen experts"] == tensors["EP 2, no optimizer"] == 3 * per_layer


@pytest.mark.parametrize("world", [2, 4])
def test_host_side_optimizers_move_by_their_own_structure(world):
    proofs = run_ranks(prove_structure_rank, ranks(world), of_world(STRUCTURES, world))
    assert proofs
    for proof in proofs:
        assert proof.exact and proof.noticed, proof


def test_unknown_layouts_are_refused_by_name():
    messages = run_ranks(refusal_messages, ranks(2))
    assert "--moe-grouped-gemm" in messages["SequentialMLP"]
    assert "float8_e4m3fn" in messages["8-bit parameters"]
    quantised = messages["parameters over quantised storage"]
    assert "QuantisedParameter" in quantised and "--fp8-param-gather" in quantised
    assert "local experts [0]" in messages["some experts of a layer frozen"]
    assert "--use-distributed-optimizer" in messages["no distributed optimizer"]
    assert "--exp-avg-dtype" in messages["optimizer state in bf16"]
    assert "--expert-tensor-parallel-size 1" in messages["ETP 2"]
