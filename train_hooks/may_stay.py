"""What under a MoE layer's experts may stay in its slot when experts move, each with the reason.

Everything else that the inventory finds is moved, or the job is refused by name.
"""

from __future__ import annotations

import torch

MODULE_ATTRIBUTES = {
    "_fp8_workspaces": "Transformer Engine's quantised copies of weights: rebuilt on the next "
    "micro-batch (RoutePack sets is_first_microbatch after every move)",
    "wgrad_store": "weight gradients that wait for backward_dw: empty between steps",
}
"""Plain attributes of modules that may hold tensors."""

PARAMETER_ATTRIBUTES = {
    "main_grad": "gradients: zeroed before the next backward",
    "decoupled_grad": "gradients: set anew by every step",
    "main_param": "the optimizer's main copy: moved as the optimizer's",
    "get_main_param": "a reader of the optimizer's main copy",
}
"""Attributes of parameters that may hold tensors."""

OPTIMIZER_ATTRIBUTES = {
    "state": "moved",
    "_scales": "moved: one factor a tensor (Transformer Engine's FusedAdam)",
    "param_to_inner_param": "moved: what HybridDeviceOptimizer steps on",
    "inner_param_to_orig_param": "the same tensors",
    "gpu_params_map_cpu_copy": "the same tensors",
    "cpu_copys_map_gpu_param": "the same tensors",
    "param_to_fp32_param": "the same tensors",
    "fp32_param_to_orig_param": "the same tensors",
    "cpu_copy_map_grad": "gradients: overwritten by every step",
}
"""Maps of an optimizer from parameters to tensors."""

FACTORS_OF = {
    torch.bfloat16: "FusedAdam makes a factor and never reads it: the range is that of fp32",
}
"""Types of optimizer state whose factor may stay."""

HOOKS = {
    "megatron.core.distributed.": "DDP waits for parameter gathers",
    "megatron.core.extensions.": "Megatron's own",
    "transformer_engine.": "Transformer Engine's own",
}
"""Forward and backward hooks on expert modules, by the start of their qualified name."""

EXTRA_STATE = ("transformer_engine.", "megatron.core.extensions.")
"""Modules whose `_extra_state` is the quantisation recipe's: empty but for delayed scaling."""
