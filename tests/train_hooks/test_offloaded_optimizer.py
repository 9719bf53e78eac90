"""The real HybridDeviceOptimizer through its life: init, step, save, load, move, step at lr 0.

It offloads CUDA parameters only: here a parameter says it is one, and streams are stood in for.
"""

from __future__ import annotations

import contextlib
import copy
from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from train_hooks.optimizer_state import MAIN, UnknownOptimizer, shard_state


class OnDevice(torch.nn.Parameter):
    """A parameter that says it lies on a GPU."""

    is_cuda = True


class _Event:
    def wait(self, stream=None):
        pass

    synchronize = wait


class _Stream:
    def wait_stream(self, other):
        pass

    def record_event(self):
        return _Event()


@pytest.fixture
def device(monkeypatch):
    """Streams and pinned memory, as no-ops."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *a: _Stream())
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *a: self)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))


class Job:
    """Two experts of one element each, in parameter groups as Megatron makes them."""

    def __init__(self, num_groups: int):
        self.shards = [OnDevice(torch.tensor([float(v)], dtype=torch.bfloat16)) for v in (1, 2)]
        groups = [{"params": self.shards}]
        if num_groups == 2:
            groups = [{"params": [shard], "weight_decay": 0.0} for shard in self.shards]
        self.hybrid = HybridDeviceOptimizer(
            groups,
            offload_fraction=1.0,
            cpu_optimizer_cls=torch.optim.AdamW,
            gpu_optimizer_cls=torch.optim.AdamW,
            param_update_in_fp32=True,
            lr=1e-3,
            weight_decay=0.0,
        )
        where = [(0, 0), (0, 1)] if num_groups == 1 else [(0, 0), (1, 0)]
        self.part = SimpleNamespace(  # what shard_state reads of a DistributedOptimizer
            optimizer=self.hybrid,
            _get_model_param_range_map=lambda param: {"param": SimpleNamespace(start=0)},
            model_param_gbuf_map=dict.fromkeys(self.shards),
            model_param_group_index_map=dict(zip(self.shards, where)),
        )

    def step(self, lr: float) -> None:
        for group in self.hybrid.param_groups:
            group["lr"] = lr
        for shard in self.shards:
            shard.grad = torch.ones_like(shard)
        self.hybrid.step()

    def reload(self) -> None:
        self.hybrid.load_state_dict(copy.deepcopy(self.hybrid.state_dict()))

    def tensors(self, which: int) -> dict[str, torch.Tensor]:
        return shard_state(self.part, self.shards[which]).elements

    def exchange(self) -> None:
        """What a commit does to two experts that trade places."""
        first, second = self.tensors(0), self.tensors(1)
        assert first.keys() == second.keys() == {MAIN, "exp_avg", "exp_avg_sq"}
        for a, b in [*((first[k], second[k]) for k in first), (self.shards[0], self.shards[1])]:
            kept = a.detach().clone()
            a.data.copy_(b.data)
            b.data.copy_(kept)


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("life", ["stepped", "loaded", "loaded twice", "loaded, stepped"])
def test_a_move_reaches_the_tensor_that_the_host_steps_on(device, num_groups, life):
    job = Job(num_groups)
    job.step(1e-3)
    for _ in range({"stepped": 0, "loaded twice": 2}.get(life, 1)):
        job.reload()
    if life == "loaded, stepped":
        job.step(1e-3)
    masters = [job.tensors(k)[MAIN].item() for k in (0, 1)]
    moments = [job.tensors(k)["exp_avg"].item() for k in (0, 1)]
    assert masters[0] != masters[1]
    job.exchange()
    job.step(0.0)
    assert [job.tensors(k)[MAIN].item() for k in (0, 1)] == masters[::-1]
    assert [round(shard.item()) for shard in job.shards] == [2, 1]
    expected = [0.9 * m + 0.1 for m in moments[::-1]]
    assert [job.tensors(k)["exp_avg"].item() for k in (0, 1)] == pytest.approx(expected)


def test_control_the_name_in_the_state_is_another_tensor_after_a_load(device):
    """What the mover read before: after a load it is not what the host's Adam steps on."""
    job = Job(1)
    job.step(1e-3)
    job.reload()
    shard = job.shards[0]
    stale = job.hybrid.state[shard]["master_param"]
    assert stale is not job.hybrid.param_to_inner_param[shard]
    stale.fill_(7.0)
    job.step(0.0)
    assert round(shard.item()) == 1


def test_a_second_copy_of_another_value_is_refused(device):
    job = Job(1)
    job.step(1e-3)
    job.reload()
    job.hybrid.state[job.shards[0]]["master_param"].fill_(7.0)
    with pytest.raises(UnknownOptimizer, match="two fp32 copies"):
        job.tensors(0)
