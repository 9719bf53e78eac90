"""The layouts of training state that a move is proven on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class StateLayout:
    """One way that Megatron lays training state over ranks and tensors.

    world = tp x cp x pp x dp; EP ranks are taken from tp x cp x dp.
    recompute: None, "full" or "selective". optimizer: "adam", "none" (a reference model), or
    "stateless" (no moments). frozen_experts: experts without gradients. num_dense_layers: of the
    four layers, the first ones; two leave the first of two stages without experts. routing: "free"
    lets routers choose, for what replay leaves no say (losses on the router, dropped tokens).
    experts: a name of `expert_variants.VARIANTS`. moments: type of precision-aware moments, which
    come with 16 remainder bits of the main copy; None for Megatron's own optimizer. offload:
    HybridDeviceOptimizer. reloaded: the optimizer's state is loaded again just before the move.
    steps_before: optimizer steps before the move. left_behind: what an earlier RoutePack forgot, as
    parts of owned names or keys; the second control forgets it again.
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
    num_groups: int = 1
    num_dense_layers: int = 1
    num_mtp_layers: int = 0
    aux_loss_coeff: float = 0.0
    z_loss_coeff: float = 0.0
    capacity_factor: float | None = None
    pad_to_capacity: bool = False
    routing: Literal["replay", "free"] = "replay"
    experts: str | None = None
    moments: Literal["fp32", "bf16", "fp16", "fp8"] | None = None
    offload: bool = False
    reloaded: bool = False
    steps_before: int = 2
    left_behind: tuple[str, ...] = ()


# fmt: off
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
    StateLayout(name="CP 2, EP 2", cp=2),
    StateLayout(name="EP 2, group limits, auxiliary and z losses", num_groups=4, routing="free",
                aux_loss_coeff=1e-2, z_loss_coeff=1e-3),
    StateLayout(name="EP 2, tokens over capacity dropped", routing="free", capacity_factor=0.8),
    StateLayout(name="EP 2, dropped and padded to capacity", routing="free", capacity_factor=0.8,
                pad_to_capacity=True),
    StateLayout(name="EP 2, an MTP layer at identity", num_mtp_layers=1),
    StateLayout(name="EP 2, a bias an expert", experts="biases", left_behind=("bias",)),
    StateLayout(name="EP 2, an adapter an expert", experts="adapters", left_behind=("lora",)),
    StateLayout(name="EP 2, tensors with a leading dimension of experts, recomputed",
                experts="leading dimension", recompute="full",
                left_behind=("output_scale", "tokens_seen")),
    StateLayout(name="EP 2, weights quantised once a step", experts="fp8 workspaces",
                left_behind=("workspaces",)),
    StateLayout(name="EP 2, INT4 quantisation-aware", experts="int4", bf16=True),
    StateLayout(name="EP 2, bf16, 16 remainder bits", bf16=True, moments="fp32",
                left_behind=("param",)),
    StateLayout(name="EP 2, 16 remainder bits, bf16 moments, biases", bf16=True, moments="bf16",
                experts="biases", left_behind=("exp_avg",)),
    StateLayout(name="EP 2, 16 remainder bits, fp16 moments with factors", bf16=True,
                moments="fp16", left_behind=("factor",)),
    StateLayout(name="EP 2, 16 remainder bits, fp8 moments with factors", bf16=True,
                moments="fp8", left_behind=("inverse factor",)),
    StateLayout(name="EP 2, split commit, 16 remainder bits", bf16=True, moments="fp32",
                split=True, left_behind=("param",)),
    StateLayout(name="EP 2, HybridDeviceOptimizer", bf16=True, offload=True,
                overlap_param_gather=True, overlap_grad_reduce=True, left_behind=("param",)),
    StateLayout(name="EP 2, HybridDeviceOptimizer before its first step", bf16=True, offload=True,
                steps_before=0, left_behind=("param",)),
    StateLayout(name="EP 2, HybridDeviceOptimizer after a load", bf16=True, offload=True,
                reloaded=True, left_behind=("param",)),
    StateLayout(name="EP 4", world=4, ep=4),
    StateLayout(name="EP 2 x EDP 2, cut experts", world=4, bf16=True),
    StateLayout(name="EP 2 x EDP 2, fp32, many buckets", world=4, bucket_size=3000),
    StateLayout(name="EP 2 x EDP 2, cut experts, 16 remainder bits, biases", world=4, bf16=True,
                moments="bf16", experts="biases", left_behind=("bias",)),
    StateLayout(name="EP 2 x EDP 2, HybridDeviceOptimizer, cut experts", world=4, bf16=True,
                offload=True, left_behind=("exp_avg",)),
    StateLayout(name="PP 2 x EP 2", world=4, pp=2),
    StateLayout(name="PP 2 x EP 2, a stage of dense layers", world=4, pp=2, num_dense_layers=2),
    StateLayout(name="PP 2, VPP 2 x EP 2, full recompute", world=4, pp=2, vpp=2, recompute="full"),
)
# fmt: on
