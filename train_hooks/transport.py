"""Carry pieces between ranks: sent from where they lie, received whole, then written.

A chunk is closed: with every range that it overwrites it also carries what was there, wherever
that goes. So a chunk is received whole before any of it is written, staging stays bounded, and the
next chunk can be on its way while one is written. Every rank enumerates the same chunks and posts
its sends and receives in the same order, so that no rank waits for another that has nothing to do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from train_hooks.pieces import Piece

View = Callable[[Piece, bool], torch.Tensor]
"""(piece, is_source) -> the flat tensor range to read or to write in place on this rank."""

NUM_LANES = 2


class Staging:
    """Buffers of one rank, allocated once, at most `num_bytes` together.

    Two lanes of a receive buffer, so that one chunk is carried while another is written. Expert
    state on the host of a CUDA job (optimizer offload) goes through pinned host buffers and a send
    buffer on the device; `via_host` forces that, for tests.
    """

    def __init__(self, num_bytes: int, device: torch.device, *, via_host: bool = False):
        if num_bytes < 1:
            raise ValueError(f"staging of {num_bytes} bytes: expected at least 1 (staging_mb)")
        self.chunk_bytes = max(1, num_bytes // (2 * NUM_LANES))
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
    """One chunk on its way: sent by the constructor, written by `finish`.

    Point to point inside `group`, which must have been used before (NCCL connects then).
    `bytes_sent` are those that leave this rank.
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
        me = group.rank()
        mine = [piece for piece in chunk.pieces if me in (piece.source, piece.target)]
        outgoing = [piece for piece in mine if piece.target != me]
        incoming = [piece for piece in mine if piece.target == me]
        self.staging, self.lane = staging, lane
        self.targets = [view(piece, False) for piece in incoming]
        self.received = staging.take("receive", lane, _num_elements(incoming), dtype)
        parts = self.received.split([t.numel() for t in self.targets]) if incoming else ()
        sources = self._on_device([view(piece, True) for piece in outgoing], dtype)
        transfers = []
        for piece, part in zip(incoming, parts):
            if piece.source == me:
                part.copy_(view(piece, True), non_blocking=True)
            else:
                transfers.append((dist.irecv, part, piece.source))
        for piece, source in zip(outgoing, sources):
            transfers.append((dist.isend, source, piece.target))
        self.works = _post(transfers, group)
        self.bytes_sent = _num_elements(outgoing) * dtype.itemsize

    @torch.no_grad()
    def finish(self) -> None:
        """Wait until the chunk is here whole and its sources are free, and write it."""
        for work in self.works:
            work.wait()
        received = self.received
        if any(map(self.staging.needs_host, self.targets)):
            received = self._host("receive", self.received)
            received.copy_(self.received, non_blocking=True)
            _synchronize(self.staging.device)
        if self.targets:
            parts = received.split([t.numel() for t in self.targets])
            for target, part in zip(self.targets, parts):
                target.copy_(part, non_blocking=True)
        _synchronize(self.staging.device)

    def _on_device(self, sources: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        """`sources` where they lie, or, of host state, packed in the send buffer."""
        if not any(map(self.staging.needs_host, sources)):
            return sources
        sizes = [source.numel() for source in sources]
        send = self.staging.take("send", self.lane, sum(sizes), dtype)
        host = self._host("send", send)
        for part, source in zip(host.split(sizes), sources):
            part.copy_(source, non_blocking=True)
        _synchronize(self.staging.device)
        send.copy_(host, non_blocking=True)
        return list(send.split(sizes))

    def _host(self, name: str, like: torch.Tensor) -> torch.Tensor:
        return self.staging.take(name, self.lane, like.numel(), like.dtype, on_host=True)


def _post(transfers: list[tuple[Callable, torch.Tensor, int]], group: dist.ProcessGroup) -> list:
    """Start sends and receives (function, tensor, rank in group); the n-th of a pair has tag n."""
    global_ranks = dist.get_process_group_ranks(group)
    numbers: Counter[tuple] = Counter()
    operations = []
    for function, tensor, peer in transfers:
        tag = numbers[function, peer]
        numbers[function, peer] += 1
        operations.append(dist.P2POp(function, tensor, global_ranks[peer], group, tag))
    return dist.batch_isend_irecv(operations) if operations else []


def _num_elements(pieces: Sequence[Piece]) -> int:
    return sum(piece.num_elements for piece in pieces)


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
