"""Empty stand-ins for packages that a CPU cannot have: torch_memory_saver and SGLang."""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import os
import pickle
import sys
import types
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path

import torch

from slime_on_cpu import watch_staging
from slime_on_cpu.engine import launch_server


class MemorySaver:
    """torch_memory_saver: memory stays where it is; what RoutePack holds of it then is written."""

    def pause(self, *args, **kwargs):
        watch_staging.write()

    def resume(self, *args, **kwargs):
        pass

    @contextlib.contextmanager
    def disable(self, *args, **kwargs):
        yield

    region = disable

    def get_cpu_backup(self, tensor, zero_copy=False):
        return None


@dataclass
class ServerArgs:
    """sglang.srt.server_args.ServerArgs with the fields that slime sets or reads."""

    model_path: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    api_key: str | None = None
    node_rank: int = 0
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    moe_dp_size: int = 1
    enable_return_routed_experts: bool = False

    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @staticmethod
    def add_cli_args(parser):
        for name in ("pp", "dp", "ep", "moe-dp"):
            parser.add_argument(f"--{name}-size", type=int, default=1)

    @classmethod
    def from_cli_args(cls, args):
        return cls()


class MultiprocessingSerializer:
    @staticmethod
    def serialize(value, output_str=False):
        data = pickle.dumps(value)
        return base64.b64encode(data).decode() if output_str else data


class FlattenedTensorBucket:
    """Named tensors as one flat byte tensor."""

    supports_multi_dtypes = True

    def __init__(self, named_tensors=None, **kwargs):
        self.named_tensors = named_tensors

    def get_metadata(self):
        return [(name, tensor.shape, tensor.dtype) for name, tensor in self.named_tensors]

    def get_flattened_tensor(self):
        return torch.cat([t.reshape(-1).view(torch.uint8) for _, t in self.named_tensors])


def _module(name: str, **attributes) -> types.ModuleType:
    if name not in sys.modules:
        module = types.ModuleType(name)
        module.__path__ = []
        module.__spec__ = ModuleSpec(name, None)
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(_module(parent), last, module)
    for key, value in attributes.items():
        setattr(sys.modules[name], key, value)
    return sys.modules[name]


def install() -> None:
    """Put the stand-ins into sys.modules; real SGLang is left alone where it is installed."""
    saver = _module("torch_memory_saver", torch_memory_saver=MemorySaver())
    # slime looks for the preloaded library beside the package (ray/actor_group.py); the test
    # fixture makes an empty file of that name, which the loader ignores.
    beside = Path(os.environ.get("ROUTEPACK_TEST_OUTPUT", "/tmp"))
    saver.__file__ = str(beside / "torch_memory_saver" / "__init__.py")
    if importlib.util.find_spec("sglang") is not None:
        return
    _module("sglang")
    _module(
        "sglang.srt.constants",
        GPU_MEMORY_TYPE_CUDA_GRAPH="cuda_graph",
        GPU_MEMORY_TYPE_KV_CACHE="kv_cache",
        GPU_MEMORY_TYPE_WEIGHTS="weights",
    )
    _module("sglang.srt.server_args", ServerArgs=ServerArgs)
    _module("sglang.srt.entrypoints.http_server", launch_server=launch_server)
    _module(
        "sglang.srt.utils",
        kill_process_tree=lambda *args, **kwargs: None,
        MultiprocessingSerializer=MultiprocessingSerializer,
    )
    _module("sglang.srt.utils.patch_torch", monkey_patch_torch_reductions=lambda: None)
    _module(
        "sglang.srt.weight_sync.tensor_bucket",
        FlattenedTensorBucket=FlattenedTensorBucket,
    )
