"""Install every stand-in once per process; Megatron's parts are patched when they are imported."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import sys

_installed = False


def install() -> None:
    """Make slime importable and trainable here; call before importing slime or Megatron."""
    global _installed
    if _installed:
        return
    _installed = True
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("SLIME_ACCELERATOR", "cpu")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    import torch

    from slime_on_cpu import stand_ins, torch_cpu, watch_staging

    torch.set_num_threads(1)
    torch_cpu.patch()
    stand_ins.install()
    _register_accelerator()
    _AfterImport(
        {
            "megatron.core.tensor_parallel.random": _patch_random,
            "megatron.core.transformer.moe.moe_utils": _patch_moe,
            "megatron.core.transformer.moe.token_dispatcher": _patch_moe,
            "megatron.core.optimizer.optimizer_config": _patch_optimizer_config,
            "megatron.core.optimizer.distrib_optimizer": _patch_optimizer,
            "slime.utils.reloadable_process_group": _patch_process_group,
            "train_hooks.staging": watch_staging.patch,
        }
    )


def _register_accelerator() -> None:
    """slime's own public registry of accelerators (slime/utils/accelerator)."""
    import torch
    from slime.utils import accelerator
    from slime.utils.accelerator.base import Accelerator

    from slime_on_cpu.torch_cpu import CPU, STREAM

    class CPUAccelerator(Accelerator):
        name = device_type = "cpu"
        communication_backend_name = "gloo"

        def is_available(self):
            return True

        def device(self, index=None):
            return CPU

        def device_name(self, index=None):
            return "cpu"

        def set_device(self, index):
            pass

        def current_device(self):
            return "cpu"

        def device_count(self):
            return 1

        def synchronize(self, device=None):
            pass

        def current_stream(self, device=None):
            return STREAM

        default_stream = current_stream

        def stream(self, stream):
            return contextlib.nullcontext()

        def empty_cache(self):
            pass

        def mem_get_info(self, device=None):
            return (1 << 34, 1 << 34)

        def memory_allocated(self, device=None):
            return 0

        memory_reserved = memory_allocated

        def manual_seed(self, seed):
            torch.manual_seed(seed)

        manual_seed_all = manual_seed

        def autocast(self, *args, **kwargs):
            return torch.autocast("cpu", *args, **kwargs)

    accelerator.register_accelerator(
        "cpu", CPUAccelerator, lambda: True, priority=1, communication_backends=()
    )


class _AfterImport:
    """A meta-path finder that calls a function on a module right after it has been executed."""

    def __init__(self, patches):
        self.patches, self.busy = patches, set()
        sys.meta_path.insert(0, self)

    def find_spec(self, name, path=None, target=None):
        if name not in self.patches or name in self.busy:
            return None
        self.busy.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.busy.discard(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            self.patches[name](module)

        spec.loader.exec_module = exec_module
        return spec


def _patch_random(module) -> None:
    import torch

    module._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(
        state
    )
    quiet = logging.getLogger(module.__name__)
    quiet.addFilter(lambda record: "RNG state changed" not in record.getMessage())


def _patch_moe(module) -> None:
    import torch

    def split_sizes_to_cpu(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if torch.is_tensor(tensor) and as_numpy else tensor

    module.maybe_move_tensor_to_cpu = split_sizes_to_cpu
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None  # upstream NameError without Transformer Engine


def _patch_process_group(module) -> None:
    """torch 2.13 has collectives that slime's reloadable group does not forward yet."""
    import torch

    group = module.ReloadableProcessGroup
    for name in [
        "all_gather_single",
        "reduce_scatter_single",
        "all_to_all_single",
        "allgather_single",
        "alltoall_single",
    ]:
        if hasattr(torch.distributed.ProcessGroup, name) and name not in group.__dict__:

            def forward(self, *args, _name=name, **kwargs):
                return self._fwd(_name, *args, **kwargs)

            setattr(group, name, forward)


def _patch_optimizer_config(module) -> None:
    """Upstream compares a version that is None without Transformer Engine."""
    module.is_te_min_version = lambda version, check_equality=True: False


def _patch_optimizer(module) -> None:
    """Megatron's own checkpoint of torch's Adam in fp32, which four lines of it rule out.

    `state_dict` asks a fresh optimizer for its step (`assert len(steps) == 1`; only TE's has an
    answer): it gets its state first, by Megatron's own function for that, which changes no
    parameter without weight decay. An fp32 main parameter is a view of the model's, which may be
    written without autograd only. `_set_main_param_and_optimizer_states` wants the step, which its
    callers took out, since param_groups have restored it. And `load_state_dict` gives all
    parameters one step tensor, which torch's Adam then counts up once for each of them.

    An optimizer that is offloaded needs none of this: Megatron's own lines for it run, which it
    reads where Transformer Engine is installed.
    """
    import torch

    from app.matrix.offload import pretend_parameters_are_on_a_device

    pretend_parameters_are_on_a_device()
    optimizer = module.DistributedOptimizer
    sharded, write = optimizer.sharded_state_dict, optimizer._set_main_param_and_optimizer_states

    def is_offloaded(self):
        return isinstance(self.optimizer, module.HybridDeviceOptimizer)

    def as_with_transformer_engine(original):
        @functools.wraps(original)
        def call(self, *args, **kwargs):
            before, module.HAVE_APEX_OR_TE = module.HAVE_APEX_OR_TE, is_offloaded(self)
            try:
                return original(self, *args, **kwargs)
            finally:
                module.HAVE_APEX_OR_TE = before

        return call

    state_dict = as_with_transformer_engine(optimizer.state_dict)
    load = as_with_transformer_engine(optimizer.load_state_dict)

    def sharded_state_dict(self, model_sharded_state_dict=None, is_loading=False, **kwargs):
        if is_loading and not self.optimizer.state and not is_offloaded(self):
            self._init_optimizer_states_with_dummy_values()
        return sharded(self, model_sharded_state_dict or {}, is_loading, **kwargs)

    def write_with_step(self, model_param, tensors):
        if not is_offloaded(self):
            group, order = self.model_param_group_index_map[model_param]
            main_param = self.optimizer.param_groups[group]["params"][order]
            tensors = {**tensors, "step": self.optimizer.state[main_param]["step"]}
        write(self, model_param, tensors)

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        load(self, state_dict)
        if not is_offloaded(self):
            for state in self.optimizer.state.values():
                state["step"] = state["step"].clone()

    optimizer.state_dict = state_dict
    optimizer.sharded_state_dict = sharded_state_dict
    optimizer._set_main_param_and_optimizer_states = write_with_step
    optimizer.load_state_dict = load_state_dict
