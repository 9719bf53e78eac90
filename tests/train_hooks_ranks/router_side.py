"""What the rank processes of test_router_side.py do."""

from __future__ import annotations

import app.local.cpu_megatron  # isort: skip  # noqa: F401  before megatron

from dataclasses import replace

import torch
import torch.distributed as dist

from app.local.policy_equivalence import random_placement
from app.matrix.layouts import StateLayout
from app.matrix.prove import initialize_parallel
from app.matrix.trainer import MatrixTrainer, _loss, random_rows
from train_hooks.row_execution import execute_rows

RATE = 1e-2


def moved_trainer(shape: StateLayout) -> MatrixTrainer:
    trainer = MatrixTrainer(shape)
    trainer.step(0)
    trainer.committer.move_to(random_placement(trainer.layout.placement(), 3), "test")
    return trainer


def bias_and_recompute(config) -> dict:
    """Under recompute and a random layout: how the expert bias moved, and what routers replayed."""
    result = {}
    initialize_parallel(StateLayout(name="recompute"))
    for recompute in ("full", "selective"):
        shape = StateLayout(name=recompute, recompute=recompute, bias_update_rate=RATE)
        trainer = moved_trainer(shape)
        runs = {True: [], False: []}  # with gradients: the recomputation; without: the first pass
        layer = trainer.layout.layers[2]

        def record(router, args, output, runs=runs):
            runs[torch.is_grad_enabled()].append(output[1].clone())

        layer.router.register_forward_hook(record)
        before = {n: m.router.expert_bias.clone() for n, m in trainer.layout.layers.items()}
        counts = torch.stack([batch.counts for batch in random_rows(shape, 7)]).sum(0)
        dist.all_reduce(counts)
        trainer.step(7)
        counts = counts.float()
        expected = RATE * (counts.mean(dim=1, keepdim=True) - counts).sign()
        change = torch.stack(
            [m.router.expert_bias - before[n] for n, m in trainer.layout.layers.items()]
        )
        again = [torch.equal(a, b) for a, b in zip(runs[False], runs[True], strict=True)]
        result[recompute] = {
            "bias_error": (change - expected).abs().max().item(),
            "bias_moved": int((change != 0).sum()),
            "runs": len(again),
            "equal": all(again),
            "distinct_rows": len({str(m.nonzero().tolist()) for m in runs[True]}),
        }
    return result


def layers_under_pipelining(config) -> dict:
    """Case 6: [0,1,1,1] over PP 2 and VPP 2: whose layers, and what a shifted demand does."""
    shape = StateLayout(name="pp", world=4, pp=2, vpp=2)
    initialize_parallel(shape)
    trainer = MatrixTrainer(shape)
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, trainer.layout.layer_numbers)
    trainer.step(0)
    flat = StateLayout(name="no pipeline", world=4)  # a refusal under PP would leave stages waiting
    initialize_parallel(flat)
    trainer = MatrixTrainer(flat)
    rows = [replace(batch, counts=batch.counts.roll(1, dims=0)) for batch in random_rows(flat, 1)]
    shifted = ""
    try:
        execute_rows(trainer.chunks, rows, _loss, trainer.layout)
    except ValueError as error:
        shifted = str(error)
    return {"layers": everyone, "shifted": shifted}


def losses_and_capacity_take_part(config) -> dict:
    """That the matrix's router losses reach the router, and that its capacity drops tokens."""
    initialize_parallel(StateLayout(name="router"))
    plain = StateLayout(name="plain", routing="free", num_groups=4)
    weights = {}
    for name, shape in {
        "plain": plain,
        "aux": replace(plain, aux_loss_coeff=1e-2),
        "z": replace(plain, z_loss_coeff=1e-3),
    }.items():
        trainer = MatrixTrainer(shape)
        for step in range(2):
            trainer.step(step)
        weights[name] = trainer.layout.layers[1].router.weight.detach().clone()
    dropping = moved_trainer(replace(plain, num_groups=1, capacity_factor=0.8))
    routed = []
    dropping.layout.layers[1].router.register_forward_hook(
        lambda router, args, output: routed.append(int(output[1].sum()))
    )
    batches = random_rows(plain, 1)
    dropping.step(1)
    return {
        "aux": not torch.equal(weights["plain"], weights["aux"]),
        "z": not torch.equal(weights["plain"], weights["z"]),
        "routed": routed,
        "wanted": [2 * batch.tokens.size(1) for batch in batches],
    }


def attention_across_parts(config) -> dict:
    """PackedAttention over CP 2 against one SDPA over whole sequences, forward and backward."""
    from types import SimpleNamespace

    from app.local.cpu_modules import PackedAttention

    initialize_parallel(StateLayout(name="cp", cp=2))
    rank, lengths, heads, channels = dist.get_rank(), (8, 12), 2, 4
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(20, heads, channels, generator=generator) for _ in range(3)]
    upstream = torch.randn(20, heads * channels, generator=generator)
    parts, start = [], 0
    for length in lengths:  # zigzag: of four blocks, rank r holds r and 3 - r
        blocks = torch.arange(start, start + length).chunk(4)
        parts.append(torch.cat([blocks[rank], blocks[3 - rank]]))
        start += length
    mine = torch.cat(parts)
    packed = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 8, 20]))

    def run(num_parts, tensors, gradient):
        settings = SimpleNamespace(attention_dropout=0.0, context_parallel_size=num_parts)
        leaves = [t.clone().requires_grad_() for t in tensors]
        core = PackedAttention(settings, 1, None, None)
        out = core(*leaves, packed_seq_params=packed).flatten(1)
        out.backward(gradient)
        return [out.detach(), *(leaf.grad.flatten(1) for leaf in leaves)]

    expected = run(1, whole, upstream)
    got = run(2, [t[mine] for t in whole], upstream[mine])
    return {"worst": max((a[mine] - b).abs().max().item() for a, b in zip(expected, got))}
