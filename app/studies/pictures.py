"""The paper's Figures 5, 8 and 14, drawn from our own windows."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from app.studies.policies import Split
from app.studies.skew import Skew
from planner.policies import POLICIES

COLORS = dict(
    zip(POLICIES, ("#8c8c8c", "#bdbdbd", "#4c72b0", "#dd8452", "#55a868", "#c44e52"), strict=True)
)


def draw_skew(skew: Skew, path: Path) -> None:
    """Figure 5: expert shares, rank max/mean by layer, distance between rank profiles."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6))
    num_experts = skew.expert_share.shape[1]
    for share in skew.expert_share:
        axes[0].plot(np.arange(1, num_experts + 1), share, color="#4c72b0", alpha=0.25, lw=0.8)
    axes[0].plot(np.arange(1, num_experts + 1), skew.expert_share.mean(axis=0), color="#c44e52")
    axes[0].axhline(1 / num_experts, ls="--", color="black", lw=0.8)
    axes[0].set(xlabel="expert, by falling share", ylabel="share of the layer", yscale="log")
    axes[0].set_title("(a) expert shares, all windows; dashed: 1/E", fontsize=9)
    lowest = skew.expert_share[skew.expert_share > 0]
    axes[0].set_ylim(bottom=float(lowest.min()) / 1.5 if len(lowest) else None)
    places = range(len(skew.layer_numbers))
    axes[1].bar(places, skew.rank_ratio.mean(axis=0), color="#4c72b0")
    spread = np.array([skew.rank_ratio.min(axis=0), skew.rank_ratio.max(axis=0)])
    axes[1].vlines(places, spread[0], spread[1], color="black", lw=0.8)
    axes[1].axhline(1, ls="--", color="black", lw=0.8)
    step = max(1, len(skew.layer_numbers) // 12)
    axes[1].set_xticks(list(places)[::step], [str(n) for n in skew.layer_numbers][::step])
    axes[1].set_ylim(bottom=0.9)
    axes[1].set(xlabel="MoE layer", ylabel="rank max / mean")
    axes[1].set_title("(b) EP rank load by layer, range over windows", fontsize=9)
    image = axes[2].imshow(skew.distance, cmap="viridis", vmin=0)
    axes[2].set(xlabel=skew.profiles, ylabel=skew.profiles)
    if skew.names:
        axes[2].set_xticks(range(len(skew.names)), skew.names, rotation=90, fontsize=7)
        axes[2].set_yticks(range(len(skew.names)), skew.names, fontsize=7)
    axes[2].set_title("(c) sqrt JSD of rank profiles", fontsize=9)
    figure.colorbar(image, ax=axes[2])
    _save(figure, path)


def draw_splits(splits: dict[str, list[Split]], path: Path) -> None:
    """Figure 8: modelled work of each policy, waiting hatched, and the joint cost by window."""
    reference = splits.get("base") or next(iter(splits.values()))
    scale = float(np.mean([_total(split) for split in reference]))
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.8))
    names = list(splits)
    bottom = np.zeros(len(names))
    for part, label, color, hatch in (
        ("dense_mean", "dense work", "#4c72b0", None),
        ("dense_gap", "dense gap (peak - mean)", "#a9bddb", "///"),
        ("expert_mean", "expert work", "#dd8452", None),
        ("expert_gap", "expert gap (peak - mean)", "#f2cdb8", "///"),
    ):
        height = [np.mean([getattr(one, part) for one in splits[name]]) / scale for name in names]
        axes[0].bar(
            names, height, bottom=bottom, label=label, color=color, hatch=hatch, edgecolor="white"
        )
        bottom += np.array(height)
    axes[0].set_ylabel("modelled work over base's")
    axes[0].tick_params(axis="x", labelsize=8)
    axes[0].set_ylim(0, 1.3 * float(bottom.max()))
    axes[0].legend(fontsize=7, loc="upper center", ncols=2)
    axes[0].set_title("peak = mean + gap, summed over rows; window means", fontsize=9)
    _draw_windows(axes[1], splits, np.array([split.joint for split in reference]))
    _save(figure, path)


def draw_schedules(joint: dict[str, np.ndarray], labels: dict[str, str], path: Path) -> None:
    """Figure 14: joint cost of every schedule over base's, window by window."""
    figure, axis = plt.subplots(figsize=(7.5, 3.8))
    for name, values in joint.items():
        bold = name in ("base", "global_ffd", "routepack")
        axis.plot(
            range(1, len(values) + 1),
            100 * values,
            marker="o" if bold else ".",
            ms=4 if bold else 3,
            lw=1.6 if bold else 0.8,
            ls="-" if bold else "--",
            label=labels[name],
        )
    axis.set(xlabel="window", ylabel="joint cost (base = 100)")
    axis.set_title("one placement for each window, identical for all schedules", fontsize=9)
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    _save(figure, path)


def _draw_windows(axis: plt.Axes, splits: dict[str, list[Split]], reference: np.ndarray) -> None:
    for name, of_policy in splits.items():
        joint = np.array([split.joint for split in of_policy]) / reference
        if len(joint) == 1:
            axis.bar(name, joint[0], color=COLORS.get(name))
        else:
            windows = range(1, len(joint) + 1)
            axis.plot(windows, joint, marker=".", label=name, color=COLORS.get(name))
    axis.set_ylabel("joint cost over base's")
    axis.set_title("joint modelled cost of every window", fontsize=9)
    if len(reference) > 1:
        axis.set_xlabel("window")
        axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    else:
        axis.tick_params(axis="x", labelsize=8)


def _total(split: Split) -> float:
    return split.dense_mean + split.dense_gap + split.expert_mean + split.expert_gap


def _save(figure: plt.Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)
