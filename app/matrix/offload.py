"""Let HybridDeviceOptimizer offload on a machine without a GPU: parameters say they are on one.

It offloads CUDA parameters only. Everything else of it runs as it is: its copies on the host, its
sub-optimizers, its hooks, its loading.
"""

from __future__ import annotations

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer


class _OnDevice(torch.Tensor):
    """A parameter that says it lies on a GPU; what is computed from it does not."""

    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl


def pretend_parameters_are_on_a_device() -> None:
    """While the optimizer sorts its parameters by device, call all of them CUDA's; idempotent."""
    original = HybridDeviceOptimizer._get_sub_optimizer_param_groups
    if getattr(original, "pretends", False):
        return

    def sorted_by_device(self, offload_fraction):
        params = [p for group in self.param_groups for p in group["params"]]
        classes = [p.__class__ for p in params]
        for param in params:
            param.__class__ = _OnDevice
        try:
            return original(self, offload_fraction)
        finally:
            for param, kept in zip(params, classes):
                param.__class__ = kept

    sorted_by_device.pretends = True
    HybridDeviceOptimizer._get_sub_optimizer_param_groups = sorted_by_device
