"""The two kernel stand-ins against plain indexing; no server is needed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import app.sglang_cpu

KERNELS = Path(app.sglang_cpu.__file__).parent / "stand_ins" / "sgl_kernel" / "__init__.py"


@pytest.fixture(scope="module")
def kernels():
    spec = importlib.util.spec_from_file_location("stand_in_kernels", KERNELS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_cache_locations_go_into_each_requests_row(kernels):
    pool = torch.full((3, 6), -1, dtype=torch.int32)
    kernels.assign_req_to_token_pool_cpu(
        torch.tensor([2, 0]),
        pool,
        torch.tensor([1, 4]),
        torch.tensor([4, 6]),
        torch.tensor([10, 11, 12, 20, 21]),
        pool.shape[1],
    )
    assert pool.tolist() == [
        [-1, -1, -1, -1, 20, 21],
        [-1, -1, -1, -1, -1, -1],
        [-1, 10, 11, 12, -1, -1],
    ]


def test_cache_rows_move_in_every_layer_although_they_overlap(kernels):
    buffers = [torch.randn(6, 2, 3), torch.randn(6, 4)]
    source, target = torch.tensor([0, 1, 2]), torch.tensor([1, 2, 5])
    expected = []
    for buffer in buffers:
        moved = buffer.clone()
        moved[target] = buffer[source]
        expected.append(moved)
    kernels.copy_all_layer_kv_cache_cpu(
        torch.tensor([buffer.data_ptr() for buffer in buffers]),
        torch.tensor([buffer[0].numel() * 4 for buffer in buffers]),
        target,
        source,
    )
    for buffer, moved in zip(buffers, expected):
        assert torch.equal(buffer, moved)


def test_other_kernels_import_and_say_their_name_when_called(kernels):
    with pytest.raises(NotImplementedError, match="verify_tree_greedy_cpu"):
        kernels.verify_tree_greedy_cpu()
    with pytest.raises(AttributeError, match="flash_attn"):
        _ = kernels.flash_attn
