"""Chunks of pieces: closed, and bounded in the bytes that any rank sends or receives.

A chunk is closed: with every range that it overwrites it also carries what was there, wherever
that goes. So staging stays bounded, and one chunk can be on its way while another is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from train_hooks.pieces import Piece


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Closed pieces, with the layers they belong to."""

    pieces: tuple[Piece, ...]
    layers: tuple[int, ...]


def chunks_of(units_of_layer: Iterable[tuple[int, Sequence[Piece]]], limit: int) -> Iterator[Chunk]:
    """Yield chunks in which no rank sends or receives more than `limit` bytes.

    units_of_layer: (layer number, closed unit of pieces). Units are packed in order and halved
    where a single one is too large. An element alone may exceed `limit`.
    """
    held: list[Piece] = []
    layers: list[int] = []
    load = _Load()
    for number, unit in units_of_layer:
        for part in _halved(list(unit), limit):
            joined = _Load(part, load)
            if held and joined.busiest > limit:
                yield Chunk(pieces=tuple(held), layers=tuple(dict.fromkeys(layers)))
                held, layers, joined = [], [], _Load(part)
            held += part
            layers.append(number)
            load = joined
    if held:
        yield Chunk(pieces=tuple(held), layers=tuple(dict.fromkeys(layers)))


class _Load:
    """Bytes that each rank sends and receives."""

    def __init__(self, pieces: Sequence[Piece] = (), earlier: _Load | None = None):
        self.sent = dict(earlier.sent) if earlier else {}
        self.received = dict(earlier.received) if earlier else {}
        for piece in pieces:
            size = piece.num_elements * piece.itemsize
            self.sent[piece.source] = self.sent.get(piece.source, 0) + size
            self.received[piece.target] = self.received.get(piece.target, 0) + size

    @property
    def busiest(self) -> int:
        """Bytes of the rank that sends or receives most."""
        return max([*self.sent.values(), *self.received.values()], default=0)


def _halved(unit: list[Piece], limit: int) -> Iterator[list[Piece]]:
    if not unit:
        return
    low = min(p.start for p in unit)
    high = max(p.start + p.num_elements for p in unit)
    if _Load(unit).busiest <= limit or high - low <= 1:
        yield unit
        return
    middle = (low + high) // 2
    yield from _halved(_clipped(unit, low, middle), limit)
    yield from _halved(_clipped(unit, middle, high), limit)


def _clipped(unit: list[Piece], low: int, high: int) -> list[Piece]:
    parts = []
    for piece in unit:
        start = max(low, piece.start)
        stop = min(high, piece.start + piece.num_elements)
        if start < stop:
            parts.append(piece._replace(start=start, num_elements=stop - start))
    return parts
