"""Seeded supervised training that gives the starting weights of every comparison."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from app.config import RunConfig
from app.local.model import build_hf
from app.local.ranks import run_ranks
from app.local.tasks import draw_task
from app.local.trainer import LocalTrainer
from app.results.progress import track
from train_hooks.micro_batch import MicroBatch, TrainingTrajectory, pack

FOLDER = Path("runs") / "warmup"


def warmup_path(config: RunConfig) -> Path:
    """Where the weights of this configuration lie: one file per model, task and warm-up setting."""
    decisive = {
        name: asdict(getattr(config, name))
        for name in ("model", "routing_skew", "tasks", "warmup", "ranks")
    }
    digest = hashlib.sha256(json.dumps([decisive, config.seed], sort_keys=True).encode())
    return FOLDER / f"{config.name}-{digest.hexdigest()[:12]}.safetensors"


def ensure_warm(config: RunConfig) -> Path:
    """Return the path of the starting weights, training them first if they are missing."""
    path = warmup_path(config)
    if not path.exists():
        warm_up(config)
    return path


def warm_up(config: RunConfig) -> dict[str, Any]:
    """Train from seeded weights on right answers and save the result; return its figures."""
    return run_ranks(_warm_up_rank, config, str(warmup_path(config)))


def starting_weights(path: str | Path) -> dict[str, torch.Tensor]:
    """Read the weights that `warm_up` saved, under transformers' names."""
    return load_file(str(path))


def _warm_up_rank(config: RunConfig, path: str) -> dict[str, Any]:
    started = time.perf_counter()
    hf = build_hf(config.model, config.routing_skew, config.seed)
    trainer = LocalTrainer(config)
    trainer.bridge.load(hf.state_dict())
    settings = config.warmup
    rng = np.random.default_rng([config.seed, 1 + dist.get_rank()])
    losses, step = [], 0
    for step in track(range(settings.num_steps), "warm-up", dist.get_rank() == 0):
        progress = step / max(1, settings.num_steps)
        trainer.set_lr(settings.lr * min(1.0, (step + 1) / 10) * (1 - 0.9 * progress))
        batch, loss = _supervised_batch(config, rng)
        result = trainer.step([batch], loss, routing="free")
        losses.append(result.loss)
        over = torch.tensor(time.perf_counter() - started > settings.max_seconds)
        dist.all_reduce(over, op=dist.ReduceOp.MAX)
        if over:
            break
    weights = trainer.bridge.export()
    if dist.get_rank() == 0:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(path).with_suffix(".tmp")
        save_file(weights, temporary)
        temporary.rename(path)
    return {
        "warmup.seconds": time.perf_counter() - started,
        "warmup.steps": float(step + 1 if losses else 0),
        "warmup.first_loss": losses[0] if losses else 0.0,
        "warmup.last_loss": float(np.mean(losses[-10:])) if losses else 0.0,
        "warmup.mb": sum(w.numel() * w.element_size() for w in weights.values()) / 2**20,
    }


def _supervised_batch(config: RunConfig, rng: np.random.Generator):
    """One micro-batch of right answers, with a loss averaged over the ranks' answer tokens."""
    examples = []
    for _ in range(config.warmup.batch_size):
        task = draw_task(config.tasks, rng)
        tokens = torch.from_numpy(np.concatenate([task.prompt, task.answer]))
        mask = torch.zeros(len(tokens) - 1)
        mask[len(task.prompt) - 1 :] = 1.0
        examples.append(
            TrainingTrajectory(tokens=tokens, routed=None, counts=None, targets={"mask": mask})
        )
    batch = pack(0, examples)
    num_tokens = batch.targets["mask"].sum()
    dist.all_reduce(num_tokens)

    def loss(log_probs: torch.Tensor, batch: MicroBatch):
        terms = -log_probs * batch.targets["mask"]
        total = terms.sum() / num_tokens
        zero = torch.zeros(())
        return total, {
            "loss": total.detach().double(),
            "loss_magnitude": total.detach().double(),
            "max_log_prob_difference": zero,
            "clip_fraction": zero,
            "kl": zero,
        }

    return batch, loss
