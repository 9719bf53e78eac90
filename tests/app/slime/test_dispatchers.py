"""Token dispatchers under a moved layout: Megatron's own flex managers, and refusals by name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from app.slime.seams import DISPATCHERS, SeamError, check, dispatcher_seams

FLEX = {"moe_token_dispatcher_type": "flex", "moe_enable_deepep": False}


def test_alltoall_has_no_further_seam():
    assert dispatcher_seams(SimpleNamespace(moe_token_dispatcher_type="alltoall")) == ()


def test_megatrons_flex_dispatchers_take_the_dense_map():
    pytest.importorskip("megatron.core")
    for backend in DISPATCHERS:
        check(dispatcher_seams(SimpleNamespace(**FLEX, moe_flex_dispatcher_backend=backend)))
    old = dict(FLEX, moe_enable_deepep=True)
    assert dispatcher_seams(SimpleNamespace(**old)) == (DISPATCHERS["deepep"],)


def test_an_unknown_flex_backend_is_refused_by_name():
    with pytest.raises(SeamError, match=r"--moe-flex-dispatcher-backend nccl_ep: .*deepep"):
        dispatcher_seams(SimpleNamespace(**FLEX, moe_flex_dispatcher_backend="nccl_ep"))


def test_a_dispatcher_that_takes_ordered_ids_is_refused_by_name(monkeypatch):
    dispatcher = pytest.importorskip("megatron.core.transformer.moe.token_dispatcher")

    def setup_metadata(self, topk_indices, topk_probs):
        pass

    monkeypatch.setattr(dispatcher._DeepepManager, "setup_metadata", setup_metadata)
    with pytest.raises(SeamError, match=r"megatron seam .*_DeepepManager.setup_metadata takes"):
        check([DISPATCHERS["deepep"]])


@pytest.mark.parametrize("backend", DISPATCHERS)
def test_flex_dispatchers_send_every_token_to_the_slots_of_its_experts(backend):
    """Dense weights and map, permuted as the layout does, through Megatron's own metadata."""
    torch = pytest.importorskip("torch")
    dispatcher = pytest.importorskip("megatron.core.transformer.moe.token_dispatcher")
    generator = torch.Generator().manual_seed(5)
    num_tokens, num_experts, top_k = 64, 16, 4
    scores = torch.rand(num_tokens, num_experts, generator=generator) + 0.1
    chosen = scores.topk(top_k).indices
    routing_map = torch.zeros(num_tokens, num_experts, dtype=torch.bool).scatter(1, chosen, True)
    probs = scores * routing_map
    expert_of_slot = torch.randperm(num_experts, generator=generator)
    name = DISPATCHERS[backend].name.partition(".")[0]
    manager = object.__new__(getattr(dispatcher, name))  # __init__ wants the kernels
    manager.num_experts, manager.router_topk = num_experts, top_k
    manager.capacity_factor, manager.drop_and_pad = None, False
    manager.setup_metadata(
        routing_map.index_select(1, expert_of_slot), probs.index_select(1, expert_of_slot)
    )
    if backend == "deepep":
        slots, weights = manager.token_indices, manager.token_probs
    else:
        slots = manager.routing_map.nonzero()[:, 1].view(num_tokens, top_k)
        weights = manager.token_probs.gather(1, slots)
    experts = expert_of_slot[slots]
    assert torch.equal(experts.sort(1).values, chosen.sort(1).values)
    assert torch.equal(weights, probs.gather(1, experts))
