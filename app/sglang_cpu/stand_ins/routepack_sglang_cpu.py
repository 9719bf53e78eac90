"""Two `sglang.srt.plugins` plug-ins for what SGLang 0.5.23 does on a GPU only.

Plain memory for the routed-experts buffer of the host: the default registers it with CUDA.
Source: sglang/srt/state_capturer/base.py, which looks its allocator up in
sglang/srt/mem_cache/pool_host/common.py `ALLOC_MEMORY_FUNCS`.

Ling's routed_scaling_factor: bailing_moe.py leaves it to the GPU's fused kernels, and the CPU's
`moe_forward_native` does not know it, while glm4_moe.py and deepseek_v2.py apply it themselves.
"""

from __future__ import annotations


def use_plain_host_memory() -> None:
    """Register an allocator for the device `cpu`; SGLang calls this in each of its processes."""
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    ALLOC_MEMORY_FUNCS["cpu"] = allocate_plain


def allocate_plain(
    dims,
    dtype,
    device,
    pin_memory=False,
    allocator=None,
    registration_granularity_bytes=None,
):
    """Return an unpinned, uninitialised tensor; the last three arguments concern pinning."""
    import torch

    return torch.empty(dims, dtype=dtype, device=device)


def scale_routed_experts_of_ling() -> None:
    """Multiply the routed experts' output by the factor; only for a server of Ling 2.0."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    block = "sglang.srt.models.bailing_moe.BailingMoESparseMoeBlock"
    HookRegistry.register(f"{block}._forward_router_experts", scaled, HookType.AROUND)


def scaled(original, block, *args, **kwargs):
    """The block's routed output times its factor, where top-k has not applied it."""
    output = original(block, *args, **kwargs)
    if block.experts.should_fuse_routed_scaling_factor_in_topk:
        return output
    return output * block.routed_scaling_factor
