"""Prepare a commit: all that can fail, fails here, while the old layout still trains.

Everything that executing needs is made first: moves, the inventory checked again, pieces, chunks,
views, staging of both lanes, transfers, checksums before. Then all ranks agree that they are ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from train_hooks.agreement import agree_ready
from train_hooks.chunks import chunks_of
from train_hooks.expert_state import ExpertState, StateKind
from train_hooks.layout import LayoutError
from train_hooks.pieces import COPY, Half, Move, Piece, pieces_of_layer
from train_hooks.staging import Staging
from train_hooks.transport import Carrier, Preparation, Traffic

Kinds = dict[str, tuple[StateKind, ...]]
LayerMoves = list[tuple[int, list[Move]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """One commit, or one half of a split one, ready to be carried.

    refresh: (host copy, part of the model) of the experts that arrive on this rank, for the tag
    that equals the model.
    """

    carriers: list[Carrier]
    refresh: list[tuple[torch.Tensor, torch.Tensor]]
    traffic: Traffic


def prepare(
    state: ExpertState,
    staging: Staging,
    views: Views,
    moves: LayerMoves,
    half: Half,
    window_id: int,
    also: Callable[[Kinds], None] = lambda kinds: None,
) -> Prepared:
    """Make everything that carrying `moves` needs; collective over `ExpertState.group`.

    also: what else must be ready, such as checksums of the state before. Raises LayoutError on
    every rank, with what a rank said, if any rank cannot: nothing has been sent or written, and the
    layout goes on as it was.
    """
    prepared, failure = None, None
    try:
        state.refuse_what_is_new()
    except Exception as error:
        failure = _said(error)
    kinds: Kinds = {}
    try:  # collective until the optimizer's class keeps all it will: no rank may leave it out
        if any(m for _, m in moves):
            kinds = state.kinds()
        if failure is None:
            prepared = _prepared(state, staging, views, moves, half, kinds)
            also(kinds)
    except Exception as error:
        failure = failure or _said(error)
    agree_ready(failure, f"the commit of window {window_id}", state.layout.device, state.group)
    if prepared is None:
        raise LayoutError(f"the commit of window {window_id} was not prepared: {failure}")
    return prepared


def _prepared(state, staging, views, moves, half, kinds) -> Prepared:
    copies = state.host_copies
    travelling: Sequence[str] = ()
    if copies is not None and half != "optimizer":
        travelling = [tag for tag in copies.tags if tag != copies.live_tag]
    units = (
        (number, unit)
        for number, of_layer in moves
        if of_layer
        for unit in pieces_of_layer(state, number, of_layer, kinds, half, travelling)
    )
    views.begin()
    preparation = Preparation(views, state.group, staging)
    for chunk in chunks_of(units, staging.chunk_bytes):
        preparation.add(chunk)
    refresh = []
    if copies is not None and copies.live_tag is not None and half != "optimizer":
        refresh = list(_refreshed(state, moves, copies.live_tag))
        num_bytes = sum(target.numel() * target.element_size() for target, _ in refresh)
        preparation.traffic.host += num_bytes
        preparation.traffic.host_needed += num_bytes
    return Prepared(carriers=preparation.carriers(), refresh=refresh, traffic=preparation.traffic)


def _refreshed(state: ExpertState, moves: LayerMoves, tag: str) -> Iterator[tuple]:
    """(host copy, part of the model) of every expert that arrives on this rank."""
    for number, of_layer in moves:
        layer = state.inventory[number]
        per_rank = len(layer.experts)
        for move in of_layer:
            if move.to_slot // per_rank != state.ep_rank:
                continue
            for part in layer.experts[move.to_slot % per_rank]:
                if isinstance(part.tensor, torch.nn.Parameter):
                    copy = state.host_copies.of(tag, part.tensor)
                    yield part._replace(tensor=copy).live(), part.live()


class Views:
    """The bytes of a piece on this rank, looked up once a tensor and commit.

    What an earlier commit looked up is used again while it is still the same memory.
    """

    def __init__(self, state: ExpertState):
        self.state = state
        self._known: dict[tuple[int, str | None], tuple[Any, int, torch.Tensor]] = {}
        self._checked: set[tuple[int, str | None]] = set()

    def begin(self) -> None:
        """Start a commit: everything is checked again on first use."""
        self._checked.clear()

    def __call__(self, piece: Piece, is_source: bool) -> torch.Tensor:
        part = piece.source_part if is_source else piece.target_part
        key = id(part.tensor), piece.key
        if key not in self._checked:
            self._check(key, part.tensor, piece)
        _, offset, flat = self._known[key]
        start = 0 if piece.factor else part.start + piece.start - offset
        begin = start * piece.itemsize
        return flat[begin : begin + piece.num_elements * piece.itemsize]

    def _check(self, key: tuple[int, str | None], tensor: torch.Tensor, piece: Piece) -> None:
        made_of, offset, found = self._find(tensor, piece)
        known = self._known.get(key)
        if known is None or known[0] is not made_of or known[2].data_ptr() != found.data_ptr():
            flat = found.detach().view(-1).view(torch.uint8)
            self._known[key] = made_of, offset, flat
        self._checked.add(key)

    def _find(self, tensor: torch.Tensor, piece: Piece) -> tuple[Any, int, torch.Tensor]:
        """(what it was found in, first element, the tensor that the piece's key names)."""
        if piece.key is None:
            return tensor, 0, tensor
        if piece.key.startswith(COPY):
            copy = self.state.host_copies.of(piece.key.removeprefix(COPY), tensor)
            if copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                raise LayoutError(
                    f"the host copy {piece.key.removeprefix(COPY)!r} of {piece.name} is "
                    f"{copy.dtype} {tuple(copy.shape)}, the model has {tensor.dtype} "
                    f"{tuple(tensor.shape)}"
                )
            return copy, 0, copy
        held = self.state.shard(tensor)
        found = None if held is None else (held.factors if piece.factor else held.elements)
        if not found or piece.key not in found:
            raise LayoutError(
                f"the optimizer has no {piece.key} for {piece.name} of expert {piece.expert}, and "
                "has it for others: load its state whole, or not at all"
            )
        return held, held.start, found[piece.key]


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
