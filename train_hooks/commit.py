"""Commit a placement: move expert state between ranks, exactly, at a training-step boundary.

Protocol (Section 3.2, Figure 6): agree on the plan, wait for pending parameter gathers, then send
only what moves, receive whole chunks, write them into the existing slots. Parameter objects,
shapes, gradient buffers and communicators stay as they are. From the first byte until the last
write every forward is refused, so a commit that fails can not be trained on.

A split commit moves the parameters at once and the optimizer's tensors later, at any time before
`optimizer.step`, which refuses to run until they have arrived.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch

from planner.placement import Placement
from train_hooks.agreement import agree
from train_hooks.checksums import checksums, describe_difference
from train_hooks.expert_state import ExpertState
from train_hooks.layout import ExpertLayout, LayoutError
from train_hooks.pieces import Move, Piece, moves_between, optimizer_pieces, parameter_pieces
from train_hooks.transport import NUM_LANES, Carried, Chunk, Staging, chunks_of

Verify = Literal["off", "sample", "full"]
SAMPLE_SHARE = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitOptions:
    """staging_mb: megabytes (2^20) of send and receive buffers. verify: checksums of no, a quarter
    of the moved, or all layers before and after. split: optimizer state follows later."""

    staging_mb: float = 256
    verify: Verify = "off"
    split: bool = False


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
        self._flat: dict[tuple[int, bool], tuple[int, dict[str | None, torch.Tensor]]] = {}
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
        proof = _Proof(state, layout.placement(), self._checked_layers(moves, window_id))
        layout.begin_change(f"the commit of window {window_id} did not finish")
        bytes_sent = self._move_parameters(moves, window_id)
        if self.options.split and num_moved:
            self._pending = _Pending(moves, placement, window_id, proof)
        else:
            bytes_sent += self._move_optimizer(moves, window_id)
            proof.check(placement, window_id)
        layout.finish_change(placement)
        self.away_from = None
        return CommitReport(
            num_moved=num_moved,
            bytes_sent=bytes_sent,
            seconds=time.perf_counter() - start,
            verify_seconds=proof.seconds,
            version=placement.version,
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
        self.layout.begin_change(f"the split commit of window {held.window_id} did not finish")
        sent = self._move_optimizer(held.moves, held.window_id)
        held.proof.check(held.placement, held.window_id)
        self.layout.finish_change(held.placement)
        self._pending = None
        return sent

    def _move_parameters(self, moves, window_id: int) -> int:
        pieces = [(n, list(parameter_pieces(self.state, n, m))) for n, m in moves if m]
        if not pieces:
            return 0
        return self._carry(pieces, pieces[0][1][0].source_param.dtype, window_id)

    def _move_optimizer(self, moves, window_id: int) -> int:
        if not any(m for _, m in moves):
            return 0
        keys = self.state.optimizer_keys()
        pieces = [(n, list(optimizer_pieces(self.state, n, m, keys))) for n, m in moves if m]
        return self._carry(pieces, torch.float32, window_id)

    def _carry(
        self, pieces: list[tuple[int, list[Piece]]], dtype: torch.dtype, window_id: int
    ) -> int:
        """Carry all pieces, packing each chunk while the one before is on its way."""
        sent = 0
        self._flat.clear()
        on_the_way: tuple[Chunk, Carried] | None = None
        chunks = chunks_of(pieces, self.staging.chunk_bytes, dtype.itemsize)
        for number, chunk in enumerate(chunks):
            with _named_failure(chunk, window_id):
                carried = Carried(
                    chunk, self._view, self.state.group, self.staging, dtype, number % NUM_LANES
                )
            sent += carried.bytes_sent
            if on_the_way is not None:
                with _named_failure(on_the_way[0], window_id):
                    on_the_way[1].finish()
            on_the_way = chunk, carried
        if on_the_way is not None:
            with _named_failure(on_the_way[0], window_id):
                on_the_way[1].finish()
        return sent

    def _view(self, piece: Piece, is_source: bool) -> torch.Tensor:
        param = piece.source_param if is_source else piece.target_param
        start = piece.source_start if is_source else piece.target_start
        offset, tensors = self._flat_tensors(param, piece.key is not None)
        start -= offset
        return tensors[piece.key][start : start + piece.num_elements]

    def _flat_tensors(
        self, param: torch.nn.Parameter, of_optimizer: bool
    ) -> tuple[int, dict[str | None, torch.Tensor]]:
        """(offset of the tensors in `param`, flat tensors by piece key), looked up once a move."""
        held = self._flat.get((id(param), of_optimizer))
        if held is None:
            held = (
                self.state.optimizer_shards(param)
                if of_optimizer
                else (0, {None: param.data.view(-1)})
            )
            self._flat[id(param), of_optimizer] = held
        return held

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


@contextmanager
def _named_failure(chunk: Chunk, window_id: int) -> Iterator[None]:
    """Say which layers, experts and ranks an error of the transport concerns."""
    try:
        yield
    except Exception as error:
        ranks = sorted({p.source for p in chunk.pieces} | {p.target for p in chunk.pieces})
        experts = sorted({p.expert for p in chunk.pieces})
        raise LayoutError(
            f"commit of window {window_id} failed in MoE layers {list(chunk.layers)}, experts "
            f"{experts}, between ranks {ranks} of the expert group: {error}. Expert state may be "
            "incomplete; restart from the last checkpoint"
        ) from error


class _Proof:
    """Checksums before a move, compared with those after it."""

    def __init__(self, state: ExpertState, placement: Placement, layers: dict[int, int]):
        self.state, self.layers = state, layers
        self.seconds = 0.0
        if layers:
            start = time.perf_counter()
            self.keys = state.optimizer_keys()
            self.before = checksums(state, placement, layers, self.keys)
            self.seconds += time.perf_counter() - start

    def check(self, placement: Placement, window_id: int) -> None:
        """Raise LayoutError if anything changed but its place."""
        if not self.layers:
            return
        start = time.perf_counter()
        after = checksums(self.state, placement, self.layers, self.keys)
        self.seconds += time.perf_counter() - start
        difference = describe_difference(self.before, after, self.layers, self.keys)
        if difference is not None:
            raise LayoutError(
                f"commit of window {window_id} is not exact: {difference}. Training must not go "
                "on; restart from the last checkpoint"
            )


class _Pending(NamedTuple):
    """The second half of a split commit."""

    moves: list[tuple[int, list[Move]]]
    placement: Placement
    window_id: int
    proof: _Proof
