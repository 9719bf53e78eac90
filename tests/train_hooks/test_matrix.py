"""Every supported layout of training state, moved on real ranks and compared bit for bit."""

from __future__ import annotations

import pytest

from app.commands.verify_matrix import of_world, ranks
from app.local.ranks import run_ranks
from app.matrix.layouts import RUN
from app.matrix.prove import prove_rank
from app.matrix.refusals import refusal_messages

pytestmark = pytest.mark.ranks

LAYERS, EXPERTS, MATRICES = 3, 12, 2


@pytest.mark.parametrize("world", [2, 4])
def test_every_layout_moves_exactly_and_its_controls_are_noticed(world):
    shapes = of_world(RUN, world)
    proofs = run_ranks(prove_rank, ranks(world), shapes)
    assert [p.name for p in proofs] == [s.name for s in shapes]
    for shape, proof in zip(shapes, proofs):
        assert proof.num_different == 0, proof
        assert proof.num_later == 0 and proof.loss_difference == 0, proof
        assert proof.noticed, proof
        assert proof.forgotten is (True if shape.left_behind else None), proof
    if world == 2:
        owned = LAYERS * EXPERTS * MATRICES
        tensors = {p.name: p.num_tensors / owned for p in proofs}
        expected = {
            "EP 2, fp32": 3,  # itself and two moments
            "EP 2, bf16 with fp32 main shards": 4,
            "EP 2, optimizer without moments": 2,
            "EP 2, frozen experts": 1,
            "EP 2, no optimizer": 1,
            "EP 2, a bias an expert": 2 * 3,
            "EP 2, an adapter an expert": 3 * 3,  # two low-rank matrices beside each
            "EP 2, tensors with a leading dimension of experts, recomputed": 2 * 3 + 1,
            "EP 2, INT4 quantisation-aware": 4,
            "EP 2, bf16, 16 remainder bits": 4,
            "EP 2, 16 remainder bits, bf16 moments, biases": 2 * 4,
            "EP 2, 16 remainder bits, fp16 moments with factors": 6,
            "EP 2, HybridDeviceOptimizer": 4,
            "EP 2, HybridDeviceOptimizer before its first step": 2,
            "EP 2, HybridDeviceOptimizer after a load": 4,
        }
        assert {name: tensors[name] for name in expected} == expected


SAID = {
    "SequentialMLP experts": "--moe-grouped-gemm",
    "fp8 primary weights": "--fp8-param-gather",
    "some experts of a layer frozen": "local experts [0]",
    "an adapter that experts share": "an adapter that experts may share",
    "a tensor of no single expert": "running_maximum",
    "a tensor in a plain attribute": "history['maxima'][0]",
    "a tensor on a parameter": "its attribute factor",
    "an unknown hook on experts": "app.matrix.refusals._hook.<locals>.<lambda>",
    "a replaced forward of experts": "app.matrix.refusals._replaced_forward",
    "a dispatch that reads logical ids": "SGLang-aligned DeepEP",
    "an unknown _extra_state": "_WithExtraState",
    "fp8 with delayed scaling": "--fp8-recipe blockwise",
    "no distributed optimizer": "--use-distributed-optimizer",
    "expert tensor parallel size 2": "--expert-tensor-parallel-size 1",
    "trained experts outside the expert buffers": "--expert-model-parallel-size above 1 (now 1)",
    "optimizer state of another shape": "exp_avg of shape (3,)",
    "optimizer state of some experts only": "Load its state whole or not at all",
    "optimizer state that appears later": "now keeps ['shadow']",
    "a map of the optimizer that is not known": "AdamW.averages",
    "experts with different step counters": "different numbers of steps",
    "a parameter of experts that appears later": "gain",
    "fp16 or fp8 moments whose shards cut experts": "--exp-avg-dtype",
    "an optimizer that cannot be tried on one element": "_Unbuildable",
}


def test_what_cannot_move_is_refused_by_name_with_what_to_change():
    messages = run_ranks(refusal_messages, ranks(2))
    assert messages.keys() == SAID.keys()
    for name, text in SAID.items():
        assert text in messages[name], (name, messages[name])
