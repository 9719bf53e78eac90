"""Is the calibrated cost model worth it? `full` under both, paired on the same windows.

The protocol is that of `routepack compare` (definitions.md): one snapshot per window, each variant
carries its own placement, one warm-up, timed repeats, the order rotated, a control of the default.
"""

from __future__ import annotations

import app.local.cpu_megatron  # isort: skip  # noqa: F401  before megatron

from dataclasses import replace

import torch.distributed as dist

from app.config import RunConfig, StageConfig
from app.local.paired_windows import CONTROL, measure_policy
from app.local.ranks import run_ranks
from app.local.rollout import sample_window
from app.local.session import open_session
from app.local.snapshot import restore, take_snapshot
from app.local.warmup import ensure_warm
from app.results.progress import track
from app.results.statistics import Spread, spread
from planner.cost import CostModel
from rollout_hooks.estimate import demand_shares

DEFAULT, CALIBRATED = "default costs", "calibrated costs"


def tps_over_default(config: RunConfig, cost: CostModel, num_windows: int) -> dict[str, Spread]:
    """Spread over windows of TPS under `cost` over TPS under the default, and of the control.

    Keys: `tps_over_default` and `default_over_default`.
    """
    stages = tuple(
        StageConfig(name=s.name, alpha=float(s.alpha), beta=float(s.beta)) for s in cost.stages
    )
    default = replace(config, planner=replace(config.planner, stages=()))
    weights = ensure_warm(config)
    tps = run_ranks(_paired_rank, default, stages, str(weights), num_windows)
    pairs = zip(tps[CALIBRATED], tps[DEFAULT], strict=True)
    control = zip(tps[CONTROL], tps[DEFAULT], strict=True)
    return {
        "tps_over_default": spread([a / b for a, b in pairs]),
        "default_over_default": spread([a / b for a, b in control]),
    }


def _paired_rank(
    config: RunConfig, stages: tuple[StageConfig, ...], weights: str, num_windows: int
) -> dict[str, list[float]]:
    """Median TPS of each window, by variant."""
    session = open_session(config, weights)
    trainer = session.trainer
    calibrated = replace(config, planner=replace(config.planner, stages=stages))
    sessions = {
        DEFAULT: session,
        CALIBRATED: replace(session, config=calibrated),
        CONTROL: session,
    }
    carried = {name: trainer.layout.placement() for name in sessions}
    tps: dict[str, list[float]] = {name: [] for name in sessions}
    snapshot, shares = take_snapshot(trainer), None
    for window_id in track(range(num_windows), "default and calibrated", dist.get_rank() == 0):
        restore(trainer, snapshot)
        rollout = sample_window(config, session.engine, window_id, shares)
        shares = demand_shares(rollout.window.demand)
        names, turn = list(sessions), window_id % len(sessions)
        for name in names[turn:] + names[:turn]:
            measured, admitted, stepped = measure_policy(
                sessions[name], snapshot, rollout, name, "full", carried[name]
            )
            carried[name] = admitted.plan.placement
            tps[name].append(measured.median_tps)
            if name == CONTROL:
                advanced = stepped
        snapshot = advanced
        restore(trainer, snapshot)
        session.engine.update_weights(trainer.bridge.export())
    return tps
