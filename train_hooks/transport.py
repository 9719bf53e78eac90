"""Carry pieces between ranks: packed into staging buffers, one all-to-all per chunk.

A chunk is closed: with every range that it overwrites it also carries what was there, wherever
that goes. So a chunk is received whole before any of it is written, staging stays bounded, and the
next chunk can be packed while one is on its way. Every rank enumerates the same chunks and enters
every collective, with zero sizes if need be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from train_hooks.pieces import Piece

View = Callable[[Piece, bool], torch.Tensor]
"""(piece, is_source) -> the flat tensor range to read or to write in place on this rank."""

NUM_LANES = 2
CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 64 << 20}
"""Largest chunk by device: small enough for a CPU's cache, or to fill a link."""


class Staging:
    """Buffers of one rank, allocated once, at most `num_bytes` together.

    Two lanes of a send and a receive buffer, so that one chunk is packed while another is carried.
    On CUDA with expert state on the host (optimizer offload), each lane has pinned host buffers
    too, through which every copy between host and device goes; `via_host` forces them, for tests.
    """

    def __init__(self, num_bytes: int, device: torch.device, *, via_host: bool = False):
        if num_bytes < 1:
            raise ValueError(f"staging of {num_bytes} bytes: expected at least 1 (staging_mb)")
        share = max(1, num_bytes // (2 * NUM_LANES))
        self.chunk_bytes = min(share, CHUNK_BYTES.get(device.type, share))
        self.device = device
        self.via_host = via_host
        self._buffers: dict[tuple, torch.Tensor] = {}

    def take(
        self, name: str, lane: int, num_elements: int, dtype: torch.dtype, *, on_host: bool = False
    ) -> torch.Tensor:
        """Return `num_elements` of a lane's buffer `name` as `dtype`."""
        wanted = num_elements * dtype.itemsize
        held = self._buffers.get((name, lane, on_host))
        if held is None or held.numel() < wanted:
            size = max(wanted, min(self.chunk_bytes, 2 * wanted))
            pinned = on_host and self.device.type == "cuda"
            device = torch.device("cpu") if on_host else self.device
            held = torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned)
            self._buffers[name, lane, on_host] = held
        return held[:wanted].view(dtype)

    def needs_host(self, tensor: torch.Tensor) -> bool:
        """Whether a copy between `tensor` and the buffers goes through pinned host memory."""
        return self.via_host or tensor.device != self.device

    @property
    def num_bytes(self) -> int:
        """Bytes that the buffers on the device take now."""
        return sum(b.numel() for (_, _, on_host), b in self._buffers.items() if not on_host)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Closed pieces of one dtype, with the layers they belong to."""

    pieces: tuple[Piece, ...]
    layers: tuple[int, ...]


def chunks_of(
    pieces_of_layer: Sequence[tuple[int, Sequence[Piece]]], limit: int, itemsize: int
) -> Iterator[Chunk]:
    """Yield chunks in which no rank sends or receives more than `limit` bytes.

    A closed unit is one range of one matrix of one layer, for all its moves; units are packed in
    order and halved where a single one is too large. An element alone may exceed `limit`.
    """
    held: list[Piece] = []
    layers: list[int] = []
    load = _Load()
    for number, pieces in pieces_of_layer:
        for unit in _units(pieces):
            for part in _halved(unit, limit, itemsize):
                joined = _Load(part, load)
                if held and joined.busiest * itemsize > limit:
                    yield Chunk(pieces=tuple(held), layers=tuple(dict.fromkeys(layers)))
                    held, layers, joined = [], [], _Load(part)
                held += part
                layers.append(number)
                load = joined
    if held:
        yield Chunk(pieces=tuple(held), layers=tuple(dict.fromkeys(layers)))


class Carried:
    """One chunk on its way: packed and sent by the constructor, written by `finish`.

    Collective over `group`. `bytes_sent` are those that leave this rank.
    """

    @torch.no_grad()
    def __init__(
        self,
        chunk: Chunk,
        view: View,
        group: dist.ProcessGroup,
        staging: Staging,
        dtype: torch.dtype,
        lane: int = 0,
    ):
        me, world = group.rank(), group.size()
        outgoing: list[list[Piece]] = [[] for _ in range(world)]
        incoming: list[list[Piece]] = [[] for _ in range(world)]
        for piece in chunk.pieces:
            if piece.source == me:
                outgoing[piece.target].append(piece)
            if piece.target == me:
                incoming[piece.source].append(piece)
        send_sizes = [sum(p.num_elements for p in pieces) for pieces in outgoing]
        receive_sizes = [sum(p.num_elements for p in pieces) for pieces in incoming]
        self.staging, self.lane = staging, lane
        self.targets = [view(piece, False) for pieces in incoming for piece in pieces]
        sources = [view(piece, True) for pieces in outgoing for piece in pieces]
        send = staging.take("send", lane, sum(send_sizes), dtype)
        self.received = staging.take("receive", lane, sum(receive_sizes), dtype)
        self._pack(sources, send)
        self.work = dist.all_to_all_single(
            self.received, send, receive_sizes, send_sizes, group=group, async_op=True
        )
        self.bytes_sent = (sum(send_sizes) - send_sizes[me]) * dtype.itemsize

    @torch.no_grad()
    def finish(self) -> None:
        """Wait until the chunk is here whole, and write it."""
        self.work.wait()
        targets, received = self.targets, self.received
        parts = received.split([t.numel() for t in targets]) if targets else ()
        if not any(map(self.staging.needs_host, targets)):
            for target, part in zip(targets, parts):
                target.copy_(part, non_blocking=True)
        else:
            host = self._host("receive", received)
            host.copy_(received, non_blocking=True)
            _synchronize(self.staging.device)
            for target, part in zip(targets, host.split([t.numel() for t in targets])):
                target.copy_(part)
        _synchronize(self.staging.device)

    def _pack(self, sources: list[torch.Tensor], send: torch.Tensor) -> None:
        buffer = send
        if any(map(self.staging.needs_host, sources)):
            buffer = self._host("send", send)
        if sources:
            for part, source in zip(buffer.split([s.numel() for s in sources]), sources):
                part.copy_(source, non_blocking=True)
        if buffer is not send:
            _synchronize(self.staging.device)
            send.copy_(buffer, non_blocking=True)

    def _host(self, name: str, like: torch.Tensor) -> torch.Tensor:
        return self.staging.take(name, self.lane, like.numel(), like.dtype, on_host=True)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class _Load:
    """Elements that each rank sends and receives."""

    def __init__(self, pieces: Sequence[Piece] = (), earlier: _Load | None = None):
        self.sent = dict(earlier.sent) if earlier else {}
        self.received = dict(earlier.received) if earlier else {}
        for piece in pieces:
            self.sent[piece.source] = self.sent.get(piece.source, 0) + piece.num_elements
            self.received[piece.target] = self.received.get(piece.target, 0) + piece.num_elements

    @property
    def busiest(self) -> int:
        """Elements of the rank that sends or receives most."""
        return max([*self.sent.values(), *self.received.values()], default=0)


def _units(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Group one layer's pieces by matrix and tensor: each group is a permutation of its own."""
    groups: dict[tuple, list[Piece]] = {}
    for piece in pieces:
        groups.setdefault((piece.matrix, piece.key), []).append(piece)
    return list(groups.values())


def _halved(unit: list[Piece], limit: int, itemsize: int) -> Iterator[list[Piece]]:
    low = min(p.source_start for p in unit)
    high = max(p.source_start + p.num_elements for p in unit)
    if _Load(unit).busiest * itemsize <= limit or high - low <= 1:
        yield unit
        return
    middle = (low + high) // 2
    yield from _halved(_clipped(unit, low, middle), limit, itemsize)
    yield from _halved(_clipped(unit, middle, high), limit, itemsize)


def _clipped(unit: list[Piece], low: int, high: int) -> list[Piece]:
    parts = []
    for piece in unit:
        start = max(low, piece.source_start)
        stop = min(high, piece.source_start + piece.num_elements)
        if start < stop:
            parts.append(
                piece._replace(source_start=start, target_start=start, num_elements=stop - start)
            )
    return parts
