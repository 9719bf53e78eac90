"""Carry pieces between ranks: packed into staging buffers, one all-to-all per chunk.

A chunk is closed: with every range that it overwrites it also carries what was there, wherever
that goes. So a chunk is received whole before any of it is written, and staging stays bounded.
Every rank enumerates the same chunks and enters every collective, with zero sizes if need be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from train_hooks.pieces import Piece

View = Callable[[Piece, bool], torch.Tensor]
"""(piece, is_source) -> the flat tensor range to read or to write in place on this rank."""


class Staging:
    """Send and receive buffers of one rank, allocated once, at most `num_bytes` together."""

    def __init__(self, num_bytes: int, device: torch.device):
        if num_bytes < 1:
            raise ValueError(f"staging of {num_bytes} bytes: expected at least 1 (staging_mb)")
        self.half = max(1, num_bytes // 2)
        self.device = device
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return `num_elements` of the buffer `name` as `dtype`; it grows to its half only once."""
        wanted = num_elements * dtype.itemsize
        held = self._buffers.get(name)
        if held is None or held.numel() < wanted:
            size = max(wanted, min(self.half, 2 * wanted))
            self._buffers[name] = held = torch.empty(size, dtype=torch.uint8, device=self.device)
        return held[:wanted].view(dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes that the buffers take now."""
        return sum(buffer.numel() for buffer in self._buffers.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Closed pieces of one dtype, with the layers they belong to."""

    pieces: tuple[Piece, ...]
    layers: tuple[int, ...]


def chunks_of(
    pieces_of_layer: Sequence[tuple[int, Sequence[Piece]]], half: int, itemsize: int
) -> Iterator[Chunk]:
    """Yield chunks in which no rank sends or receives more than `half` bytes.

    A closed unit is one range of one matrix of one layer, for all its moves; units are packed in
    order and halved where a single one is too large. An element alone may exceed `half`.
    """
    held: list[Piece] = []
    layers: list[int] = []
    for number, pieces in pieces_of_layer:
        for unit in _units(pieces):
            for part in _halved(unit, half, itemsize):
                if held and _busiest(held + part, itemsize) > half:
                    yield Chunk(pieces=tuple(held), layers=tuple(dict.fromkeys(layers)))
                    held, layers = [], []
                held += part
                layers.append(number)
    if held:
        yield Chunk(pieces=tuple(held), layers=tuple(dict.fromkeys(layers)))


@torch.no_grad()
def exchange(
    chunk: Chunk, view: View, group: dist.ProcessGroup, staging: Staging, dtype: torch.dtype
) -> int:
    """Carry one chunk; returns the bytes that left this rank. Collective over `group`."""
    me, world = group.rank(), group.size()
    outgoing = [[p for p in chunk.pieces if p.source == me and p.target == r] for r in range(world)]
    incoming = [[p for p in chunk.pieces if p.target == me and p.source == r] for r in range(world)]
    send_sizes = [sum(p.num_elements for p in pieces) for pieces in outgoing]
    receive_sizes = [sum(p.num_elements for p in pieces) for pieces in incoming]
    send = staging.take("send", sum(send_sizes), dtype)
    received = staging.take("receive", sum(receive_sizes), dtype)
    sources = [view(piece, True) for pieces in outgoing for piece in pieces]
    for target, source in zip(send.split([s.numel() for s in sources]), sources):
        target.copy_(source, non_blocking=True)
    dist.all_to_all_single(received, send, receive_sizes, send_sizes, group=group)
    targets = [view(piece, False) for pieces in incoming for piece in pieces]
    for target, source in zip(targets, received.split([t.numel() for t in targets])):
        target.copy_(source, non_blocking=True)
    if staging.device.type == "cuda":
        torch.cuda.current_stream().synchronize()
    return (sum(send_sizes) - send_sizes[me]) * dtype.itemsize


def _units(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Group one layer's pieces by matrix and tensor: each group is a permutation of its own."""
    groups: dict[tuple, list[Piece]] = {}
    for piece in pieces:
        groups.setdefault((piece.matrix, piece.key), []).append(piece)
    return list(groups.values())


def _halved(unit: list[Piece], half: int, itemsize: int) -> Iterator[list[Piece]]:
    low = min(p.source_start for p in unit)
    high = max(p.source_start + p.num_elements for p in unit)
    if _busiest(unit, itemsize) <= half or high - low <= 1:
        yield unit
        return
    middle = (low + high) // 2
    yield from _halved(_clipped(unit, low, middle), half, itemsize)
    yield from _halved(_clipped(unit, middle, high), half, itemsize)


def _clipped(unit: list[Piece], low: int, high: int) -> list[Piece]:
    parts = []
    for piece in unit:
        start = max(low, piece.source_start)
        stop = min(high, piece.source_start + piece.num_elements)
        if start < stop:
            parts.append(
                replace(piece, source_start=start, target_start=start, num_elements=stop - start)
            )
    return parts


def _busiest(pieces: Sequence[Piece], itemsize: int) -> int:
    """Bytes of the rank that sends or receives most."""
    sent: dict[int, int] = {}
    received: dict[int, int] = {}
    for piece in pieces:
        sent[piece.source] = sent.get(piece.source, 0) + piece.num_elements
        received[piece.target] = received.get(piece.target, 0) + piece.num_elements
    return itemsize * max([*sent.values(), *received.values()], default=0)
