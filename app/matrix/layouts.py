"""The layouts of training state that a move is proven on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StateLayout:
    """One way that Megatron lays training state over ranks and tensors.

    world = tp x cp x pp x dp; EP ranks are taken from tp x cp x dp.
    recompute: None, "full" or "selective". optimizer: "adam", "none" (a reference model), or
    "stateless" (no moments). frozen_experts: experts without gradients.
    """

    name: str
    world: int = 2
    tp: int = 1
    cp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 2
    top_k: int = 2
    bf16: bool = False
    bucket_size: int | None = None
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    recompute: str | None = None
    optimizer: str = "adam"
    frozen_experts: bool = False
    split: bool = False
    staging_mb: float = 256
    bias_update_rate: float = 0.0
    dispatcher: str = "alltoall"


RUN = (
    StateLayout(name="EP 2, fp32"),
    StateLayout(name="EP 2, bf16 with fp32 main shards", bf16=True),
    StateLayout(name="EP 2, many buckets, overlapped", bucket_size=4000, overlap_grad_reduce=True),
    StateLayout(
        name="EP 2, bf16, overlap_param_gather",
        bf16=True,
        bucket_size=8000,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    ),
    StateLayout(name="EP 2, staging of 16 KB, many chunks", staging_mb=1 / 64),
    StateLayout(name="EP 2, split commit, bf16", bf16=True, split=True),
    StateLayout(name="EP 2, full recompute", recompute="full"),
    StateLayout(name="EP 2, selective recompute", recompute="selective"),
    StateLayout(name="EP 2, expert bias updated", bias_update_rate=1e-2),
    StateLayout(name="EP 2, all-gather dispatcher", dispatcher="allgather"),
    StateLayout(name="EP 2, frozen experts", frozen_experts=True),
    StateLayout(name="EP 2, no optimizer", optimizer="none"),
    StateLayout(name="EP 2, optimizer without moments", optimizer="stateless", bf16=True),
    StateLayout(name="TP 2 with sequence parallel, EP 2", tp=2),
    StateLayout(name="CP 2, EP 2 (attention within each part)", cp=2),
    StateLayout(name="EP 4", world=4, ep=4),
    StateLayout(name="EP 2 x EDP 2, cut experts", world=4, bf16=True),
    StateLayout(name="EP 2 x EDP 2, fp32, many buckets", world=4, bucket_size=3000),
    StateLayout(name="PP 2 x EP 2", world=4, pp=2),
    StateLayout(name="PP 2, VPP 2 x EP 2, full recompute", world=4, pp=2, vpp=2, recompute="full"),
)
