"""How long each row took on this rank: what self-calibration learns from."""

from __future__ import annotations

import time

import numpy as np


class RowClock:
    """When each row's forward started on this rank, and when the last backward ended.

    Rows of a rank run one after the other, forward then backward, without pipeline stages.
    """

    def __init__(self, finalize_model_grads):
        self.times: list[float] = []
        self._finalize = finalize_model_grads

    def start_row(self, module, args) -> None:
        """Forward pre-hook of the model."""
        self.times.append(time.perf_counter())

    def finalize(self, *args, **kwargs):
        """Megatron's `finalize_model_grads`, which follows the last backward."""
        self.times.append(time.perf_counter())
        return self._finalize(*args, **kwargs)

    def row_seconds(self) -> np.ndarray:
        """Seconds of every row, [row]."""
        return np.diff(self.times)
