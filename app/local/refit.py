"""Self-calibration: re-fit the cost model to row times seen in training, and report the drift.

A row of EDP shard g takes seconds_per_cost * J_rg (Equations 13 to 15). Row times cannot tell two
token-linear stages apart, since their slowest slot is nearly always the same; so three factors are
fitted: one for all alpha, one for all beta, one for the expert term. Which slot is slowest depends
on the factors: slots and factors are found in turn until the slots stay (a few rounds).

Where the rows cannot tell token pairs from tokens (cells of one length, or little attention), the
standard error of beta's factor says so, and alpha and beta then share one factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import nnls

from planner.cost import CostModel
from planner.placement import Placement
from planner.rows import Rows
from planner.score import rank_demand, row_costs
from planner.topology import Topology
from planner.window import Window

MAX_ROUNDS = 20
MIN_ROWS = 30
"""Fewer rows than this do not pin three factors at a few per cent of noise."""
LARGEST_ERROR = 0.15
"""Relative standard error above which beta has no factor of its own."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowObservation:
    """What the rows of one trained window held, and how long each took.

    linear, pairs: [row, EDP shard, slot of the shard] sum t/C and sum (t/C)^2 of the cells.
    expert: [row, EDP shard] E_rg. seconds: [row, EDP shard] measured forward and backward.
    """

    linear: np.ndarray
    pairs: np.ndarray
    expert: np.ndarray
    seconds: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class Refit:
    """The re-fitted cost model and how far it is from the one in use.

    drift: largest relative change of a coefficient, the expert unit apart. r2: of the row times.
    error: largest relative standard error of a fitted factor. tells_pairs: beta has its own.
    """

    cost: CostModel
    seconds_per_cost: float
    drift: float
    r2: float
    error: float
    tells_pairs: bool
    num_rows: int


def observe(
    window: Window,
    rows: Rows,
    topology: Topology,
    placement: Placement,
    seconds: np.ndarray,
) -> RowObservation:
    """Features of an executed window's rows; `seconds` is [row, EDP shard].

    Raises ValueError when shards differ in size, or `seconds` does not fit the rows.
    """
    shape = (rows.num_rows, topology.num_shards)
    seconds = np.asarray(seconds, np.float64)
    if seconds.shape != shape:
        raise ValueError(f"seconds: got shape {seconds.shape}, the rows need {shape}")
    if len({len(shard) for shard in topology.edp_shards}) > 1:
        raise ValueError("edp_shards: self-calibration needs shards of equal size")
    kept = rows.kept
    share = window.length[kept] / topology.capacity
    slots = np.array(topology.edp_shards)
    cells = (rows.num_rows, rows.num_dp_slots)
    linear = np.bincount(rows.cell[kept], share, rows.num_cells).reshape(cells)
    pairs = np.bincount(rows.cell[kept], share**2, rows.num_cells).reshape(cells)
    q = rank_demand(window.demand, placement)
    expert = row_costs(window.length, q, rows, topology, CostModel())[1]
    return RowObservation(
        linear=linear[:, slots], pairs=pairs[:, slots], expert=expert, seconds=seconds
    )


def refit(observations: Sequence[RowObservation], cost: CostModel) -> Refit:
    """Fit the three factors to all rows of `observations`, starting from the model in use.

    Noise is taken as a share of a row's time. Raises ValueError for too few rows, a time that is
    not positive, or times that leave the expert term at zero.
    """
    linear = np.concatenate([o.linear.reshape(-1, o.linear.shape[2]) for o in observations])
    pairs = np.concatenate([o.pairs.reshape(-1, o.pairs.shape[2]) for o in observations])
    expert = np.concatenate([o.expert.ravel() for o in observations])
    seconds = np.concatenate([o.seconds.ravel() for o in observations])
    if len(seconds) < MIN_ROWS:
        raise ValueError(
            f"observations: {len(seconds)} rows, at least {MIN_ROWS} are needed; collect more "
            "windows"
        )
    if not (np.isfinite(seconds) & (seconds > 0)).all():
        raise ValueError(f"observations: every row time must be positive, got {seconds.min()}")
    tells_pairs = bool(cost.beta.any())
    factors, error, features = _fit(linear, pairs, expert, seconds, cost, tells_pairs)
    if tells_pairs and not error[1] <= LARGEST_ERROR:
        tells_pairs = False
        factors, error, features = _fit(linear, pairs, expert, seconds, cost, tells_pairs)
    if factors[2] <= 0:
        raise ValueError(
            "observations: the row times do not depend on expert load; keep the configured costs"
        )
    dense = factors[:2] / factors[2]
    residual = seconds - features @ factors
    total = ((seconds - seconds.mean()) ** 2).sum()
    return Refit(
        cost=_scaled(cost, *dense),
        seconds_per_cost=float(factors[2]),
        drift=float(np.abs(dense - 1).max()),
        r2=float(1 - (residual**2).sum() / total) if total > 0 else 0.0,
        error=float(error.max()),
        tells_pairs=tells_pairs,
        num_rows=len(seconds),
    )


def _fit(
    linear: np.ndarray,
    pairs: np.ndarray,
    expert: np.ndarray,
    seconds: np.ndarray,
    cost: CostModel,
    tells_pairs: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(factors, their relative standard errors, features [row, 3]): alpha, beta, expert."""
    factors = np.ones(3)
    slowest = _slowest(linear, pairs, cost, factors)
    share = np.eye(3) if tells_pairs else np.array([[1.0, 0], [1, 0], [0, 1]])
    for _ in range(MAX_ROUNDS):
        features = np.stack([*_dense(linear, pairs, cost, slowest), expert], axis=1)
        scaled = features @ share / seconds[:, None]
        fitted = nnls(scaled, np.ones(len(seconds)))[0]
        factors = share @ fitted
        found = _slowest(linear, pairs, cost, factors)
        if (found == slowest).all():
            break
        slowest = found
    variance = ((1 - scaled @ fitted) ** 2).sum() / (len(seconds) - scaled.shape[1])
    spread = np.sqrt(variance * np.diag(np.linalg.pinv(scaled.T @ scaled)))
    error = np.divide(spread, fitted, out=np.full(len(fitted), np.inf), where=fitted > 0)
    return factors, error[share.argmax(axis=1)], features


def _slowest(
    linear: np.ndarray, pairs: np.ndarray, cost: CostModel, factors: np.ndarray
) -> np.ndarray:
    """[stage, row] slot with the most work of each stage under the factors."""
    return np.array(
        [
            (factors[0] * s.alpha * linear + factors[1] * s.beta * pairs).argmax(axis=1)
            for s in cost.stages
        ]
    )


def _dense(
    linear: np.ndarray, pairs: np.ndarray, cost: CostModel, slowest: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """([row], [row]): token-linear and token-pair work of the slowest slots, stages added."""
    row = np.arange(len(linear))
    stages = list(zip(cost.stages, slowest, strict=True))
    return (
        np.sum([s.alpha * linear[row, slot] for s, slot in stages], axis=0),
        np.sum([s.beta * pairs[row, slot] for s, slot in stages], axis=0),
    )


def _scaled(cost: CostModel, alpha: float, beta: float) -> CostModel:
    stages = [replace(s, alpha=s.alpha * alpha, beta=s.beta * beta) for s in cost.stages]
    return CostModel(stages=tuple(stages))
