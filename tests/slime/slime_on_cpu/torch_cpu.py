"""CUDA's surface answered by the CPU: device, streams, events, generator, literal devices."""

from __future__ import annotations

import contextlib
import functools
import types

import torch

CPU = torch.device("cpu")
FACTORIES = [
    "tensor",
    "as_tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "arange",
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand",
    "randn",
    "randint",
    "linspace",
]


class NullEvent:
    """An event that has always happened."""

    def __init__(self, *args, **kwargs):
        pass

    def record(self, stream=None):
        pass

    wait = synchronize = record

    def query(self):
        return True

    def elapsed_time(self, other):
        return 0.0


class NullStream:
    """The one CPU stream, also a context manager; a class, since annotations name it."""

    device = CPU
    _only: NullStream | None = None

    def __new__(cls, *args, **kwargs):
        cls._only = cls._only or super().__new__(cls)
        return cls._only

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, stream):
        pass

    wait_event = wait_stream

    def synchronize(self):
        pass

    def record_event(self, event=None):
        return NullEvent()

    def query(self):
        return True

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False


STREAM = NullStream()


class _TypeName(str):
    """`Tensor.type()` that also equals the `torch.cuda.*` name of its dtype."""

    def __eq__(self, other):
        return isinstance(other, str) and str.__eq__(self, other.replace("torch.cuda.", "torch."))

    def __ne__(self, other):
        return not self == other

    __hash__ = str.__hash__


def _is_cuda(device) -> bool:
    if device is None or isinstance(device, bool):
        return False
    return isinstance(device, int) or str(device).startswith("cuda")


def _on_cpu(factory):
    @functools.wraps(factory)
    def call(*args, **kwargs):
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return call


def _to(original):
    def to(self, *args, **kwargs):
        args = tuple(CPU if _names_cuda(arg) else arg for arg in args)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return original(self, *args, **kwargs)

    return to


def _names_cuda(arg) -> bool:
    if isinstance(arg, int) and not isinstance(arg, bool):
        return True
    return isinstance(arg, (str, torch.device)) and _is_cuda(arg)


def _type(original):
    def type_of(self, *args, **kwargs):
        found = original(self, *args, **kwargs)
        return _TypeName(found) if isinstance(found, str) else found

    return type_of


def patch() -> None:
    """Replace CUDA's surface in torch, process-wide."""
    cuda = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.current_stream = cuda.default_stream = lambda device=None: STREAM
    cuda.Stream, cuda.Event = NullStream, NullEvent
    cuda.stream = lambda stream: contextlib.nullcontext()
    for name in [
        "set_device",
        "set_stream",
        "synchronize",
        "empty_cache",
        "manual_seed_all",
        "ipc_collect",
    ]:
        setattr(cuda, name, lambda *args, **kwargs: None)
    cuda.reset_peak_memory_stats = lambda *args, **kwargs: None
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
        setattr(cuda, name, lambda *args, **kwargs: 0)
    cuda.max_memory_reserved = lambda *args, **kwargs: 0
    cuda.mem_get_info = lambda *args: (1 << 34, 1 << 34)
    properties = types.SimpleNamespace(
        major=9, minor=0, name="cpu", total_memory=1 << 34, multi_processor_count=2, uuid="cpu"
    )
    cuda.get_device_properties = lambda *args: properties
    cuda.get_device_capability = lambda *args: (9, 0)
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *args: None
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.Tensor.record_stream = lambda self, stream: None
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.to = _to(torch.Tensor.to)
    torch.Tensor.type = _type(torch.Tensor.type)
    if not hasattr(torch._C, "_host_emptyCache"):
        torch._C._host_emptyCache = lambda: None
    torch.compile = lambda model=None, **kwargs: model if model is not None else (lambda f: f)
