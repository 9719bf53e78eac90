"""Bench of the commit: against a bare all-to-all of the same bytes between the same ranks."""

from __future__ import annotations

import statistics

from app.bench.result import BenchResult
from app.config import ModelConfig, RanksConfig, RoutingSkewConfig, RunConfig
from app.local.ranks import run_ranks

NUM_REPEATS = 10
SHARES = (0.05, 0.125, 0.25, 0.5)
SHARE = 0.25


def bench_commit(quick: bool) -> BenchResult:
    """Figures `commit.*`: a quarter of the experts of a 4-layer, 64-expert model, verify off.

    The commit sends, writes and meets at a barrier; the baseline exchanges preallocated contiguous
    tensors of the same sizes, and nothing else. Medians, alternating. `home_and_back_seconds` is
    what a save adds when a quarter of the experts is away (`train_hooks.checkpoint`).
    """
    config = RunConfig(
        name="bench_commit",
        ranks=RanksConfig(world=2, ep=2),
        model=ModelConfig(
            num_layers=5,
            num_dense_layers=1,
            hidden_size=512,
            moe_ffn_hidden_size=256,
            num_experts=64,
        ),
        routing_skew=RoutingSkewConfig(),
    )
    repeats = 3 if quick else NUM_REPEATS
    measured = run_ranks(_bench_rank, config, repeats)
    at = measured["by_share"]
    moved = [m["moved_mb"] for m in at.values()]
    seconds = [m["commit"] for m in at.values()]
    figures = {
        "commit.time_over_all_to_all": at[SHARE]["ratio_high"],
        "commit.median_time_over_all_to_all": at[SHARE]["ratio"],
        "commit.seconds": at[SHARE]["commit"],
        "commit.moved_mb": at[SHARE]["moved_mb"],
        "commit.expert_state_mb": measured["state_mb"],
        "commit.home_and_back_seconds": measured["save_seconds"],
        "commit.peak_over_staging": measured["peak_over_staging"],
        "commit.copies_per_byte": measured["copies_per_byte"],
        "commit.host_copy_bytes_over_needed": measured["host_over_needed"],
        "commit.groups_created": float(_groups_created()),
        "commit.seconds_per_mb_largest_over_smallest": (seconds[-1] / moved[-1])
        / (seconds[0] / moved[0]),
    }
    return BenchResult(figures=figures, details={"by_share": {str(k): v for k, v in at.items()}})


def _groups_created() -> int:
    """Most groups of any router with expert data parallel size 1: none is wanted."""
    from app.bench.groups import groups_of_moves
    from app.matrix.layouts import StateLayout

    shapes = [StateLayout(name="groups", bias_update_rate=rate) for rate in (0.0, 1e-2)]
    config = RunConfig(name="groups", ranks=RanksConfig(world=2, ep=2))
    return max(run_ranks(groups_of_moves, config, shape) for shape in shapes)


def _bench_rank(config: RunConfig, repeats: int) -> dict:
    import app.local.cpu_megatron  # noqa: F401  before megatron
    from app.local.trainer import LocalTrainer

    trainer = LocalTrainer(config)
    _fill_moments(trainer)
    state_mb = _expert_state_mb(trainer)
    by_share = {share: _measure(trainer, share, repeats) for share in SHARES}
    save_seconds = _home_and_back(trainer, repeats)
    staging, traffic = trainer.committer.staging, trainer.committer.traffic
    return {
        "copies_per_byte": traffic.copied / traffic.moved,
        "host_over_needed": _host_over_needed(trainer),
        "by_share": by_share,
        "state_mb": state_mb,
        "save_seconds": save_seconds,
        "peak_over_staging": staging.num_bytes / (trainer.committer.options.staging_mb * 2**20),
    }


def _measure(trainer, share: float, repeats: int) -> dict[str, float]:
    """Alternate commits there and back with bare exchanges of the same bytes."""
    import time
    from dataclasses import replace

    import torch
    import torch.distributed as dist

    state, committer = trainer.state, trainer.committer
    home = trainer.layout.placement()
    away = _swapped(home, share)
    num_bytes = 0
    commits, exchanges = [], []
    for repeat in range(2 * repeats + 2):
        target = replace(away if repeat % 2 == 0 else home, version=trainer.layout.version + 1)
        dist.barrier()
        start = time.perf_counter()
        report = committer.commit(
            target, base_version=trainer.layout.version, window_id=repeat, digest="bench"
        )
        dist.barrier()
        commits.append(time.perf_counter() - start)
        if not num_bytes:
            num_bytes = report.bytes_sent
            send = torch.zeros(num_bytes // 4)
            received = torch.zeros(num_bytes // 4)
            rank = state.group.rank()
            sizes = [0, 0]
            sizes[1 - rank] = num_bytes // 4
        dist.barrier()
        start = time.perf_counter()
        dist.all_to_all_single(received, send, sizes, sizes, group=state.group)
        dist.barrier()
        exchanges.append(time.perf_counter() - start)
    commit, exchange = statistics.median(commits[2:]), statistics.median(exchanges[2:])
    total = torch.tensor(num_bytes, dtype=torch.float64)
    dist.all_reduce(total)
    return {
        "commit": commit,
        "all_to_all": exchange,
        "ratio": commit / exchange,
        "ratio_high": _upper_end(commits[2:], exchanges[2:]),
        "moved_mb": total.item() / 2**20,
    }


def _upper_end(commits: list[float], exchanges: list[float]) -> float:
    """Upper end of the 95% bootstrap interval of the median ratio of alternating pairs."""
    import numpy as np

    ratios = np.array(commits) / np.array(exchanges)
    drawn = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    return float(np.quantile(np.median(drawn, axis=1), 0.975))


def _host_over_needed(trainer) -> float:
    """Bytes over the host link over bytes needed, of a move of state in pinned host memory."""
    import torch

    from train_hooks.staging import Staging

    committer = trainer.committer
    kept = committer.staging
    committer.staging = Staging(
        2**24, torch.device("cpu"), on_host=lambda tensor: True, pinned=lambda tensor: True
    )
    committer.move_to(_swapped(trainer.layout.placement(), SHARE), "bench")
    committer.staging = kept
    return committer.traffic.host / committer.traffic.host_needed


def _home_and_back(trainer, repeats: int) -> float:
    """Median seconds of going to identity and back, with a quarter of the experts away."""
    import time

    import torch.distributed as dist

    from train_hooks.checkpoint import logical_order

    home = trainer.layout.placement()
    trainer.committer.move_to(_swapped(home, SHARE), "bench")
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        with logical_order(trainer.committer):
            pass
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    trainer.committer.move_to(home, "bench")
    return statistics.median(seconds)


def _swapped(placement, share: float):
    """Swap the first `share` of rank 0's experts of every layer with those of rank 1."""
    from dataclasses import replace

    expert_of_slot = placement.expert_of_slot.copy()
    half = placement.num_experts // 2
    num = round(share * half)
    expert_of_slot[:, :num] = placement.expert_of_slot[:, half : half + num]
    expert_of_slot[:, half : half + num] = placement.expert_of_slot[:, :num]
    return replace(placement, expert_of_slot=expert_of_slot)


def _fill_moments(trainer) -> None:
    """Give every parameter Adam moments without running a step."""
    import torch

    for part in trainer.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for param in group["params"]:
                state = part.optimizer.state[param]
                state["step"] = torch.zeros(())
                state["exp_avg"] = torch.rand_like(param)
                state["exp_avg_sq"] = torch.rand_like(param)


def _expert_state_mb(trainer) -> float:
    import torch
    import torch.distributed as dist

    kinds = trainer.state.kinds()
    total = torch.zeros((), dtype=torch.float64)
    for layer in trainer.state.inventory.values():
        for slices in layer.experts:
            for name, part in zip(layer.names, slices):
                total += 4.0 * part.num_elements * (1 + len(kinds.get(name, ())))
    dist.all_reduce(total)
    return total.item() / 2**20
