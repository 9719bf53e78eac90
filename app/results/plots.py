"""Pictures for people: rank load by layer before and after placement."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np


def plot_rank_load(
    before: np.ndarray, after: np.ndarray, layer_numbers: Sequence[int], path: Path
) -> None:
    """Draw two heat maps of `[layer, EP rank]` loads over their layer's mean."""
    ratios = [load / load.mean(axis=1, keepdims=True) for load in (before, after)]
    limit = max(0.01, max(abs(r - 1).max() for r in ratios))
    figure, axes = plt.subplots(1, 2, figsize=(8, 1.5 + 0.3 * len(layer_numbers)))
    for axis, ratio, title in zip(axes, ratios, ("identity placement", "after placement")):
        image = axis.imshow(ratio, cmap="PuOr_r", vmin=1 - limit, vmax=1 + limit, aspect="auto")
        axis.set_title(f"{title}: max/mean {ratio.max():.3f}")
        axis.set_xlabel("EP rank")
        axis.set_xticks(range(ratio.shape[1]))
        axis.set_yticks(range(len(layer_numbers)), [str(n) for n in layer_numbers])
        if ratio.size <= 64:
            for (row, column), value in np.ndenumerate(ratio):
                axis.text(column, row, f"{value:.3f}", ha="center", va="center", fontsize=8)
    axes[0].set_ylabel("MoE layer")
    figure.colorbar(image, ax=axes, label="rank load / mean")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
