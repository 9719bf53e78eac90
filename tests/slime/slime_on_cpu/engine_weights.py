"""The weights of the stand-in engine, through each of slime's ways to update them.

After an update is complete (`continue_generation`) everything held is written to
ROUTEPACK_TEST_OUTPUT/engine-{version}.safetensors, for tests to compare with a save.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import shutil
from pathlib import Path

import torch


class EngineWeights:
    """Tensors by Hugging Face name; each method answers the endpoint of its name."""

    def __init__(self, model_path: str):
        self.model_path = model_path
        self.version = "default"
        self.held: dict[str, torch.Tensor] = {}
        self.groups: dict[str, object] = {}

    def update_weights_from_disk(self, request: dict) -> dict:
        from safetensors.torch import load_file

        for path in sorted(Path(request["model_path"]).glob("*.safetensors")):
            self.held |= load_file(path)
        return self._is_now(request)

    def update_weights_from_tensor(self, request: dict) -> dict:
        for encoded in request["serialized_named_tensors"]:
            data = pickle.loads(base64.b64decode(encoded))
            flat, offset = data["flattened_tensor"], 0
            for name, shape, dtype in data["metadata"]:
                size = shape.numel() * dtype.itemsize
                part = flat[offset : offset + size].clone()
                self.held[name] = part.view(dtype).view(shape)
                offset += size
        return self._is_now(request)

    def init_weights_update_group(self, request: dict) -> dict:
        from slime.utils.distributed_utils import init_process_group

        where = f"tcp://{request['master_address']}:{request['master_port']}"
        self.groups[request["group_name"]] = init_process_group(
            backend=request["backend"],
            init_method=where,
            world_size=request["world_size"],
            rank=request["rank_offset"],
            group_name=request["group_name"],
        )
        return {"success": True}

    def update_weights_from_distributed(self, request: dict) -> dict:
        group = self.groups[request["group_name"]]
        parts = zip(request["names"], request["dtypes"], request["shapes"])
        for name, dtype, shape in parts:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
            torch.distributed.broadcast(tensor, 0, group=group)
            self.held[name] = tensor
        return self._is_now(request)

    def pull_weights(self, request: dict) -> dict:
        """Full checkpoints are copied, deltas applied to the local copy (slime's disk format)."""
        local, target = Path(request["local_checkpoint_dir"]), request["target_version"]
        source = Path(request["source_dir"]) / f"weight_v{target:06d}"
        if target == 0:
            shutil.copytree(self.model_path, local, dirs_exist_ok=True)
            return {"success": True}
        index = json.loads((source / "model.safetensors.index.json").read_text())
        apply_delta(local, source, index)
        return {"success": True}

    def continue_generation(self, request: dict) -> dict:
        from safetensors.torch import save_file

        if self.held:
            folder = Path(os.environ["ROUTEPACK_TEST_OUTPUT"])
            tensors = {name: tensor.contiguous() for name, tensor in self.held.items()}
            save_file(tensors, folder / f"engine-{self.version}.safetensors")
        return {"success": True}

    def _is_now(self, request: dict) -> dict:
        self.version = request.get("weight_version") or self.version
        return {"success": True}


def apply_delta(local: Path, source: Path, index: dict) -> None:
    """Apply one published delta to the safetensors files of `local`, checksums verified."""
    import zstandard
    from safetensors.numpy import load_file as load_bytes
    from safetensors.torch import load_file, save_file
    from slime.utils.disk_delta import checksum

    meta = index["metadata"]
    changes: dict = {}
    for file in set(index["weight_map"].values()):
        changes |= load_bytes(source / file)
    for path in sorted(local.glob("*.safetensors")):
        tensors = load_file(path)
        for name in tensors.keys() & changes.keys():
            old = tensors[name].contiguous().view(torch.uint8).reshape(-1).numpy().copy()
            diff = zstandard.ZstdDecompressor().decompress(changes[name].tobytes())
            new = decoded(meta["delta_encoding"], old, diff)
            if checksum(meta["checksum_format"], new) != _checksums(source)[name]:
                raise ValueError(f"delta of {name} does not give what the trainer has")
            flat = torch.from_numpy(new).view(tensors[name].dtype)
            tensors[name] = flat.view(tensors[name].shape)
        save_file(tensors, path, metadata={"format": "pt"})


def decoded(encoding: str, old, diff: bytes):
    """The new bytes of a tensor (slime/utils/disk_delta.py)."""
    import numpy as np

    change = np.frombuffer(diff, np.uint8)
    if encoding == "xor":
        return old ^ change
    count = int(change[:4].view("<u4")[0])
    positions = change[4 : 4 + 4 * count].view("<u4")
    old[positions] = change[4 + 4 * count :]
    return old


def _checksums(source: Path) -> dict[str, str]:
    from safetensors import safe_open

    found: dict[str, str] = {}
    for path in source.glob("*.safetensors"):
        with safe_open(path, "numpy") as file:
            found |= file.metadata() or {}
    return found
