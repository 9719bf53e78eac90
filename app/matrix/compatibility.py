"""What rows and moves work with: the table of docs/limits.md, each entry with what holds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Standing = Literal["run here", "untested", "refused by name"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One setting of a job: how scheduled rows and moved experts stand with it, and why.

    held_by: names of the matrix's layouts or refusals, or files of tests, that show it.
    """

    setting: str
    rows: Standing
    moves: Standing
    why: str
    held_by: tuple[str, ...] = ()


# fmt: off
COMPATIBILITY = (
    Entry("alltoall dispatcher", "run here", "run here", "Megatron on gloo", ("EP 2, fp32",)),
    Entry("DeepEP v1 with slime's fork", "untested", "untested",
          "needs CUDA; Megatron's manager takes the router's dense map, as moves permute it",
          ("tests/app/slime/test_dispatchers.py",)),
    Entry("DeepEP v2", "untested", "untested", "needs CUDA", ()),
    Entry("HybridEP", "untested", "untested", "needs CUDA; takes the dense map",
          ("tests/app/slime/test_dispatchers.py",)),
    Entry("SGLang-aligned DeepEP (--deterministic-mode)", "untested", "refused by name",
          "dispatches by logical ids past the router's map",
          ("a dispatch that reads logical ids", "tests/app/slime/test_seams.py")),
    Entry("blockwise fp8 compute, bf16 parameters", "run here", "run here",
          "a stand-in of Transformer Engine's weight workspaces; the kernels need CUDA",
          ("EP 2, weights quantised once a step",)),
    Entry("fp8 with delayed scaling", "untested", "refused by name",
          "its history of maxima belongs to a slot", ("fp8 with delayed scaling",)),
    Entry("fp8 parameters (--fp8-param-gather)", "untested", "refused by name",
          "parameters over a storage of their own", ("fp8 primary weights",)),
    Entry("INT4 quantisation-aware training", "run here", "run here",
          "a stand-in that rounds in every forward", ("EP 2, INT4 quantisation-aware",)),
    Entry("CPU Adam (--optimizer-cpu-offload)", "run here", "run here",
          "the real HybridDeviceOptimizer, with parameters that say they are on a device",
          ("EP 2, HybridDeviceOptimizer", "EP 2, HybridDeviceOptimizer after a load",
           "EP 2 x EDP 2, HybridDeviceOptimizer, cut experts")),
    Entry("precision-aware Adam", "run here", "run here",
          "a stand-in of FusedAdam's state: 16 remainder bits; fp32, bf16, fp16, fp8 moments",
          ("EP 2, bf16, 16 remainder bits",
           "EP 2, 16 remainder bits, fp8 moments with factors",
           "fp16 or fp8 moments whose shards cut experts")),
    Entry("MTP layers", "run here", "run here", "their experts stay at identity",
          ("EP 2, an MTP layer at identity",)),
    Entry("LoRA, an adapter an expert", "run here", "run here", "moves with its expert",
          ("EP 2, an adapter an expert",)),
    Entry("LoRA, an adapter that experts share", "untested", "refused by name",
          "it belongs to no single expert", ("an adapter that experts share",)),
    Entry("EAGLE", "untested", "untested", "speculative decoding returns no exact routing"),
    Entry("PD disaggregation", "untested", "untested", "returns no exact routing"),
    Entry("DP attention", "untested", "untested", "a setting of rollout engines only"),
    Entry("CUDA graphs", "untested", "untested", "need CUDA"),
    Entry("fully async", "untested", "untested", "train_async.py is run, fully async is not"),
)
# fmt: on


def table() -> list[str]:
    """The table as lines of Markdown."""
    lines = ["| setting | rows | moves | why |", "|---|---|---|---|"]
    return lines + [f"| {e.setting} | {e.rows} | {e.moves} | {e.why} |" for e in COMPATIBILITY]
