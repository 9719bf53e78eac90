"""Commit a placement: move expert state between ranks, exactly, at a training-step boundary.

Protocol (Section 3.2, Figure 6): agree on the plan, wait for pending parameter gathers, prepare
all that carrying needs, agree that every rank is ready; then send only what moves and write it
into the existing slots. Parameter objects, shapes, gradient buffers and communicators stay as they
are. What fails before the first byte leaves the old layout training; from then until the last
write every forward is refused, so a commit that is torn can not be trained on.

A split commit moves the parameters at once and the optimizer's tensors later, at any time before
`optimizer.step`, which refuses to run until they have arrived. Remainder bits of a main copy go
with the parameter whose other half they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from planner.placement import Placement
from train_hooks.agreement import agree
from train_hooks.checksums import checksums, describe_difference
from train_hooks.chunks import Chunk
from train_hooks.expert_state import ExpertState
from train_hooks.layout import ExpertLayout, LayoutError
from train_hooks.pieces import Half, Move, moves_between
from train_hooks.prepare import Kinds, Prepared, Views, prepare
from train_hooks.staging import Staging
from train_hooks.transport import Traffic, carry

Verify = Literal["off", "sample", "full"]
SAMPLE_SHARE = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitOptions:
    """staging_mb: megabytes (2^20) of send and receive buffers. verify: checksums of no, a quarter
    of the moved, or all layers before and after. split: optimizer state follows later.
    restart_from: what an error names to restart from."""

    staging_mb: float = 256
    verify: Verify = "off"
    split: bool = False
    restart_from: str = "the last checkpoint"


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitReport:
    """What one commit did on this rank: experts moved, bytes sent to others, seconds, version.

    verify_seconds: what the checksums took, part of `seconds`.
    """

    num_moved: int
    bytes_sent: int
    seconds: float
    verify_seconds: float
    version: int


class Committer:
    """Commits placements into one layout; holds the staging buffers between commits."""

    def __init__(
        self, layout: ExpertLayout, state: ExpertState, options: CommitOptions | None = None
    ):
        self.layout = layout
        self.state = state
        self.options = options or CommitOptions()
        self.staging = Staging(int(self.options.staging_mb * 2**20), layout.device)
        self.views = Views(state)
        self.traffic = Traffic()
        self.before_next_move: Callable[[], None] | None = None
        self.away_from: Placement | None = None
        self._pending: _Pending | None = None
        if self.options.split and state.optimizer is not None:
            state.optimizer.optimizer.register_step_pre_hook(self._refuse_early_step)

    @torch.no_grad()
    def commit(
        self,
        placement: Placement,
        *,
        base_version: int,
        window_id: int,
        digest: str,
        moves_elsewhere: bool = False,
    ) -> CommitReport:
        """Move parameters, fp32 main shards and Adam moments so that the layout is `placement`.

        Collective over `ExpertState.group`; call between `optimizer.step()` and the next forward.
        moves_elsewhere: whether the whole model's placement moves experts of any pipeline stage,
        alike on all ranks: what must settle first (the end of an asynchronous save) is a
        collective of the world, which a stage without moves enters too.
        Raises LayoutError on all ranks, before anything moves, for a plan that differs between
        ranks, is stale, or does not fit. An error after that leaves every forward refused.
        """
        start = time.perf_counter()
        layout, state = self.layout, self.state
        agree(placement, digest, window_id, layout, base_version, state.group)
        if self._pending is not None:
            raise LayoutError(
                "the optimizer state of the last split commit has not moved yet: call finish() "
                "before optimizer.step()"
            )
        moves = [
            (number, moves_between(layout.expert_of_slot(number), new))
            for number, new in zip(layout.layer_numbers, placement.expert_of_slot)
        ]
        num_moved = sum(len(m) for _, m in moves)
        if num_moved or moves_elsewhere:
            self.settle()
        state.wait_for_parameters()
        split = self.options.split and num_moved > 0
        half: Half = "parameters" if split else "whole"
        proof = _Proof(state, layout.placement(), self._checked_layers(moves, window_id))
        rows: dict[int, torch.Tensor] = {}

        def also(kinds: Kinds) -> None:
            proof.take_before(kinds)
            rows.update(layout.rows_of(placement))

        prepared = prepare(state, self.staging, self.views, moves, half, window_id, also)
        self._execute(prepared, placement, rows, window_id)
        if split:
            self._pending = _Pending(moves, placement, window_id, proof)
        else:
            self._check(proof, placement, window_id)
        self.away_from, self.traffic = None, prepared.traffic
        return CommitReport(
            num_moved=num_moved,
            bytes_sent=prepared.traffic.sent,
            seconds=time.perf_counter() - start,
            verify_seconds=proof.seconds,
            version=placement.version,
        )

    def _execute(
        self,
        prepared: Prepared,
        placement: Placement,
        rows: dict[int, torch.Tensor],
        window_id: int,
    ) -> None:
        """Carry what is prepared; a forward is refused until the last byte is where it belongs."""
        failing = self._failing(window_id)
        self.layout.begin_change(
            f"the commit of window {window_id} did not finish", self.options.restart_from
        )
        carry(prepared.carriers, failing)
        for copy, live in prepared.refresh:
            copy.copy_(live)
        self.state.rebuild_derived()
        self.layout.finish_change(placement, rows)

    def _failing(self, window_id: int) -> Callable[[Chunk, Exception], Exception]:
        """Makes the error that names layers, experts and ranks of what the transport said."""

        def failing(chunk: Chunk, error: Exception) -> LayoutError:
            ranks = sorted({p.source for p in chunk.pieces} | {p.target for p in chunk.pieces})
            experts = sorted({p.expert for p in chunk.pieces})
            return LayoutError(
                f"commit of window {window_id} failed in MoE layers {list(chunk.layers)}, experts "
                f"{experts}, between ranks {ranks} of the expert group: {error}. Expert state may "
                f"be incomplete; restart from {self.options.restart_from}"
            )

        return failing

    def _check(self, proof: _Proof, placement: Placement, window_id: int) -> None:
        difference = proof.difference(placement)
        if difference is not None:
            self.layout.begin_change(f"it is not exact: {difference}", self.options.restart_from)
            raise LayoutError(
                f"commit of window {window_id} is not exact: {difference}. Training must not go "
                f"on; restart from {self.options.restart_from}"
            )

    def move_to(self, placement: Placement, why: str) -> CommitReport:
        """Commit `placement` from wherever the layout is: no plan chains from this move.

        For saves, resumes and tests; collective as `commit` is, and never split. The layout takes
        over the placement's version.
        """
        self.finish()
        report = self.commit(
            placement,
            base_version=self.layout.version,
            window_id=placement.version,
            digest=why,
        )
        self.finish()
        return report

    def carried(self) -> Placement:
        """Where the next plan starts from: the layout, or what a pending save left for home."""
        return self.away_from or self.layout.placement()

    def settle(self) -> None:
        """Call what must happen before state moves (the end of an asynchronous save), once."""
        waiting, self.before_next_move = self.before_next_move, None
        if waiting is not None:
            waiting()

    @torch.no_grad()
    def finish(self) -> int:
        """Move the optimizer tensors of a split commit; returns bytes sent, 0 if none is pending.

        Collective over `ExpertState.group`; call any time before `optimizer.step()`. An error
        leaves every forward refused, as in `commit`.
        """
        if self._pending is None:
            return 0
        held = self._pending
        prepared = prepare(
            self.state, self.staging, self.views, held.moves, "optimizer", held.window_id
        )
        self._execute(prepared, held.placement, {}, held.window_id)
        self._pending = None
        self._check(held.proof, held.placement, held.window_id)
        return prepared.traffic.sent

    def _checked_layers(self, moves, window_id: int) -> dict[int, int]:
        """Global number -> row of the layers whose checksums are compared."""
        moved = [(row, number) for row, (number, m) in enumerate(moves) if m]
        if self.options.verify == "off" or not moved:
            return {}
        if self.options.verify == "sample":
            count = max(1, round(SAMPLE_SHARE * len(moved)))
            rng = np.random.default_rng([window_id & 0x7FFFFFFF])
            moved = [moved[i] for i in sorted(rng.choice(len(moved), count, replace=False))]
        return {number: row for row, number in moved}

    def _refuse_early_step(self, optimizer, args, kwargs) -> None:
        if self._pending is not None:
            raise LayoutError(
                "optimizer.step() before the optimizer state of a split commit has moved: call "
                "finish() first; nothing was updated"
            )


class _Proof:
    """Checksums before a move, compared with those after it."""

    def __init__(self, state: ExpertState, placement: Placement, layers: dict[int, int]):
        self.state, self.layers, self.placement = state, layers, placement
        self.seconds = 0.0

    def take_before(self, kinds: Kinds) -> None:
        """Sum what is on this rank before the move; no collective."""
        if self.layers:
            start = time.perf_counter()
            self.kinds = kinds
            self.before = checksums(self.state, self.placement, self.layers, kinds)
            self.seconds += time.perf_counter() - start

    def difference(self, placement: Placement) -> str | None:
        """What differs now by logical expert, or None; collective over `ExpertState.group`."""
        if not self.layers:
            return None
        start = time.perf_counter()
        after = checksums(self.state, placement, self.layers, self.kinds)
        for part in (self.before, after):
            dist.all_reduce(part.sums, group=self.state.group)
        self.seconds += time.perf_counter() - start
        return describe_difference(self.before, after)


class _Pending(NamedTuple):
    """The second half of a split commit."""

    moves: list[tuple[int, list[Move]]]
    placement: Placement
    window_id: int
    proof: _Proof
