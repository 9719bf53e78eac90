"""Figure 5: routing skew under identity placement, of experts, of ranks, and between tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from app.studies.recording import Recording
from app.studies.result import StudyResult
from planner.placement import rank_load
from planner.window import Window

MOST_PROFILES = 24


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Skew:
    """The three panels of Figure 5."""

    expert_share: np.ndarray
    """[layer, expert] share of the layer's demand, all windows pooled, falling."""
    rank_ratio: np.ndarray
    """[window, layer] busiest EP rank over the mean."""
    distance: np.ndarray
    """[profile, profile] sqrt JSD of rank profiles, mean over layers, off the diagonal only."""
    profiles: str
    """What a profile is: a window, a GRPO group of the only window, or half of a task's share."""
    names: tuple[str, ...]
    """Task of each profile, empty without labels."""
    layer_numbers: tuple[int, ...]


def study_skew(
    recording: Recording, labels: Sequence[str] | None = None
) -> tuple[Skew, StudyResult]:
    """Measure skew; figures `replay.skew.*`: ratios, and distances in sqrt JSD (natural log).

    labels: tasks of the first window's trajectories; each task then gives two profiles, of its
    even and its odd trajectories, so that distances within a task stand beside those across.
    Without labels profiles are windows, or GRPO groups where there is one window.
    """
    windows = recording.windows
    identity = recording.identity()
    pooled = np.sum([window.expert_load for window in windows], axis=0, dtype=np.int64)
    share = -np.sort(-pooled / np.maximum(pooled.sum(axis=1, keepdims=True), 1), axis=1)
    ratio = []
    for window in windows:
        load = rank_load(window.expert_load, identity)
        ratio.append(load.max(axis=1) / np.maximum(load.mean(axis=1), 1e-12))
    kind, loads, names = _loads(windows, labels)
    profile = np.array([rank_load(load, identity) for load in loads], np.float64)
    profile /= np.maximum(profile.sum(axis=2, keepdims=True), 1e-12)
    distance = sqrt_jsd(profile)
    skew = Skew(
        expert_share=share,
        rank_ratio=np.array(ratio),
        distance=distance,
        profiles=kind,
        names=names,
        layer_numbers=windows[0].layer_numbers,
    )
    figures = {
        "replay.skew.hottest_expert": float(share.max() * share.shape[1]),
        "replay.skew.worst_rank_ratio": float(np.mean(skew.rank_ratio, axis=0).max()),
        "replay.skew.mean_rank_ratio": float(np.mean(skew.rank_ratio)),
    }
    if names:
        same = np.array(names)[:, None] == np.array(names)[None]
        if (~same).any():
            figures["replay.skew.distance_across_tasks"] = float(distance[~same].mean())
        same &= ~np.eye(len(names), dtype=bool)
        figures["replay.skew.distance_within_tasks"] = float(distance[same].mean())
    elif len(distance) > 1:
        off = distance[~np.eye(len(distance), dtype=bool)]
        figures["replay.skew.distance_mean"] = float(off.mean())
        figures["replay.skew.distance_max"] = float(off.max())
    rows = [[name.removeprefix("replay.skew."), f"{value:.3f}"] for name, value in figures.items()]
    result = StudyResult(
        title=f"Figure 5. Routing skew under identity (distances between {kind}s)",
        header=("quantity", "value"),
        rows=rows,
        figures=figures,
    )
    return skew, result


def _loads(
    windows: Sequence[Window], labels: Sequence[str] | None
) -> tuple[str, list[np.ndarray], tuple[str, ...]]:
    """(what a profile is, its demand [layer, expert], its task) of each profile."""
    only = windows[0]
    if labels is not None:
        found = []
        for task in sorted(set(labels)):
            members = np.flatnonzero([label == task for label in labels])
            if len(members) > 1:
                found += [(task, members[::2]), (task, members[1::2])]
        if not found:
            raise ValueError("labels: no task has two trajectories; give each task more than one")
        loads = [only.demand[members].sum(axis=0, dtype=np.int64) for _, members in found]
        return "task", loads, tuple(task for task, _ in found)
    if len(windows) > 1:
        return "window", [window.expert_load for window in windows[:MOST_PROFILES]], ()
    order = list(dict.fromkeys(only.group.tolist()))[:MOST_PROFILES]
    loads = [only.demand[only.group == g].sum(axis=0, dtype=np.int64) for g in order]
    return "GRPO group", loads, ()


def sqrt_jsd(profile: np.ndarray) -> np.ndarray:
    """[profile, profile] square root of the Jensen-Shannon divergence, mean over layers.

    profile: [profile, layer, EP rank] shares of each layer.
    """
    num = len(profile)
    result = np.zeros((num, num))
    for i in range(num):
        middle = (profile[i] + profile) / 2
        divergence = (_kl(profile[i][None], middle) + _kl(profile, middle)) / 2
        result[i] = np.sqrt(np.maximum(divergence, 0)).mean(axis=1)
    return result


def _kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Kullback-Leibler divergence over the last axis; 0 log 0 = 0."""
    p = np.broadcast_to(p, q.shape)
    safe = np.where(p > 0, p, 1.0)
    return np.where(p > 0, p * np.log(safe / np.where(q > 0, q, 1.0)), 0.0).sum(axis=-1)
