"""Let megatron-core 0.16.1 train CPU tensors over gloo. Import before `megatron` and transformers.

Megatron asks for CUDA in a few fixed places: the current device, streams and events, the "cuda"
generator, literal `device="cuda"`, and string comparisons of tensor types. Each is answered with
its CPU counterpart, process-wide. Never import this where CUDA is real: `install` refuses.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings

import torch
from packaging.version import Version

CPU = torch.device("cpu")


class _NullStream:
    """The one CPU "stream": `current_stream() != side_stream` must stay False.

    A class and not a function, since transformers writes the annotation `torch.cuda.Stream | None`.
    """

    _only: _NullStream | None = None

    def __new__(cls, *args, **kwargs):
        cls._only = cls._only or super().__new__(cls)
        return cls._only

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def synchronize(self):
        pass

    def record_event(self, event=None):
        return event or _NullEvent()

    def query(self):
        return True


class _NullEvent:
    def __init__(self, *args, **kwargs):
        pass

    def record(self, stream=None):
        pass

    def wait(self, stream=None):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True

    def elapsed_time(self, other):
        return 0.0


class _TypeName(str):
    """`Tensor.type()` of a CPU tensor that also equals the `torch.cuda.*` name of its dtype."""

    def __eq__(self, other):
        return isinstance(other, str) and str.__eq__(self, other.replace("torch.cuda.", "torch."))

    def __ne__(self, other):
        return not self == other

    __hash__ = str.__hash__


def _on_cpu(factory):
    """Wrap a tensor factory so that `device="cuda"` means the CPU."""

    @functools.wraps(factory)
    def call(*args, **kwargs):
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)  # the memory of this machine cannot be pinned
        return factory(*args, **kwargs)

    return call


def _named_type(original):
    def type_of(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        return _TypeName(result) if isinstance(result, str) else result

    return type_of


def _not_compiled(model=None, **kwargs):
    return model if model is not None else (lambda function: function)


def _patch_torch() -> None:
    cuda = torch.cuda
    cuda.current_device = lambda: CPU
    stream = _NullStream()
    cuda.current_stream = cuda.default_stream = lambda device=None: stream
    cuda.Stream, cuda.Event = _NullStream, _NullEvent
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.synchronize = lambda device=None: None
    cuda.nvtx.range_push = lambda message: None
    cuda.nvtx.range_pop = lambda: None
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    for name in ("tensor", "zeros", "ones", "empty", "full", "arange"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, device=None: self
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.type = _named_type(torch.Tensor.type)
    torch.compile = _not_compiled


def _patch_megatron() -> None:
    # Megatron says in many places that Transformer Engine and Apex are missing: on a CPU they are.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    import megatron.core.utils
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def set_rng_state(state, device=-1, graph_safe=False):
        torch.set_rng_state(state)

    def split_sizes_to_cpu(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if torch.is_tensor(tensor) and as_numpy else tensor

    random._set_cuda_rng_state = set_rng_state
    # Without Transformer Engine its version is None, which cannot be compared.
    megatron.core.utils.get_te_version = lambda: Version("0")
    # The tracker warns each time the CPU generator moves inside fork(); here that is the design.
    logging.getLogger(random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )
    moe_utils.maybe_move_tensor_to_cpu = split_sizes_to_cpu
    token_dispatcher.maybe_move_tensor_to_cpu = split_sizes_to_cpu
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # upstream NameError without Transformer Engine


def install() -> None:
    """Patch torch, then megatron-core; raises RuntimeError on a machine with CUDA."""
    if torch.cuda.is_available():
        raise RuntimeError(
            "the CPU stand-ins for Megatron must not be loaded where CUDA is real: "
            "set CUDA_VISIBLE_DEVICES= to run the embedded trainer on the CPU"
        )
    _patch_torch()
    _patch_megatron()


install()
