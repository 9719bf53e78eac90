"""Carry chunks between ranks: everything prepared first, then only sent, received and copied.

Every other move of a cycle of slots is staged at its target (`Piece.staged`) and goes first; the
others follow and arrive where they stay, since what was there has been sent. So half of the bytes
of a swap are copied once and the other half not at all. Staged pieces are written when the chunk
has crossed, while the next one is on its way. Every rank enumerates the same chunks and posts its
transfers in the same order, so that no rank waits for another that has nothing to do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from train_hooks.chunks import Chunk
from train_hooks.pieces import Piece
from train_hooks.staging import NUM_LANES, Places, Staging

View = Callable[[Piece, bool], torch.Tensor]
"""(piece, is_source) -> the flat bytes to read or to write in place on this rank."""


@dataclass(kw_only=True, slots=True)
class Traffic:
    """Bytes of one commit on this rank.

    sent: to other ranks. moved: received or moved within the rank. copied: by copies on this rank,
    what staging costs. host: copied to or from host memory; host_needed: what crosses at least.
    """

    sent: int = 0
    moved: int = 0
    copied: int = 0
    host: int = 0
    host_needed: int = 0


@dataclass(kw_only=True, slots=True)
class Carrier:
    """One chunk, ready to be carried: views, buffers and transfers all made.

    Pairs are (target, source). pack fills the send buffer; first and second are the transfers of
    the two phases; copy_first and copy_second are moves within this rank; write ends the chunk.
    """

    chunk: Chunk
    device: torch.device
    post: Callable[[list], list]
    pack_host: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    pack: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    first: list = field(default_factory=list)
    second: list = field(default_factory=list)
    copy_first: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    copy_second: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    fetch_host: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    write: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    works: list = field(default_factory=list)

    def start(self) -> None:
        """Send and receive what is staged."""
        _copy(self.pack_host)
        _copy(self.pack)
        self.works = self.post(self.first)
        _copy(self.copy_first)

    def cross(self) -> None:
        """When that has gone, send and receive what arrives where it stays."""
        _wait(self.works)
        _copy(self.copy_second)
        self.works = self.post(self.second)

    def finish(self) -> None:
        """When all is here, write what was staged."""
        _wait(self.works)
        if self.fetch_host:
            _copy(self.fetch_host)
            _synchronize(self.device)
        _copy(self.write)
        _synchronize(self.device)


def carry(carriers: Sequence[Carrier], failing: Callable[[Chunk, Exception], Exception]) -> None:
    """Carry all chunks, each on its way while the one before is written.

    failing: makes the error to raise of a chunk and what the transport said.
    """
    chunk = None
    try:
        for number, carrier in enumerate(carriers):
            chunk = carrier.chunk
            if number == 0:
                carrier.start()
            carrier.cross()
            if number + 1 < len(carriers):
                carriers[number + 1].start()
            carrier.finish()
    except Exception as error:
        raise failing(chunk, error) from error


class Preparation:
    """Makes the carriers of one commit; nothing is sent or written here."""

    def __init__(self, view: View, group: dist.ProcessGroup, staging: Staging):
        self.view, self.group, self.staging = view, group, staging
        self.me = group.rank()
        self.global_ranks = dist.get_process_group_ranks(group)
        self.tags: Counter[tuple] = Counter()
        one_by_one = dist.get_backend(group) == "gloo"
        self.post: Callable[[list], list] = _post_each if one_by_one else dist.batch_isend_irecv
        self.traffic = Traffic()
        self._planned: list[_Planned] = []

    def add(self, chunk: Chunk) -> None:
        """Look up everything of one more chunk."""
        self._planned.append(_Planned(chunk, self))

    def carriers(self) -> list[Carrier]:
        """Reserve the buffers of both lanes and make every transfer."""
        for name in ("receive", "send", "host receive", "host send"):
            for lane in range(NUM_LANES):
                sizes = [p.places[name].num_bytes for p in self._planned[lane::NUM_LANES]]
                if any(sizes):
                    self.staging.reserve(name, lane, max(sizes))
        return [
            planned.carrier(self, number % NUM_LANES)
            for number, planned in enumerate(self._planned)
        ]

    def send(self, tensor: torch.Tensor, peer: int) -> Any:
        """One transfer to `peer`; the n-th of a pair in a direction has tag n."""
        return self._transfer(dist.isend, self.group.send, tensor, peer)

    def receive(self, tensor: torch.Tensor, peer: int) -> Any:
        """One transfer from `peer`."""
        return self._transfer(dist.irecv, self.group.recv, tensor, peer)

    def _transfer(self, batched: Callable, single: Callable, tensor: torch.Tensor, peer: int):
        tag = self.tags[batched, peer]
        self.tags[batched, peer] = tag + 1
        if self.post is dist.batch_isend_irecv:
            return dist.P2POp(batched, tensor, self.global_ranks[peer], self.group, tag)
        return single, [tensor], peer, tag


class _Planned:
    """The pieces of one chunk that this rank sends or receives, with their places in buffers."""

    def __init__(self, chunk: Chunk, preparation: Preparation):
        self.chunk = chunk
        me, view, staging = preparation.me, preparation.view, preparation.staging
        self.places = {n: Places() for n in ("receive", "send", "host receive", "host send")}
        self.pieces: list[tuple[Piece, torch.Tensor | None, torch.Tensor | None]] = []
        traffic = preparation.traffic
        for piece in chunk.pieces:
            if me not in (piece.source, piece.target):
                continue
            source = view(piece, True) if piece.source == me else None
            target = view(piece, False) if piece.target == me else None
            self.pieces.append((piece, source, target))
            size = piece.num_elements * piece.itemsize
            if piece.target == me:
                traffic.moved += size
            if piece.source == piece.target:
                if piece.staged:
                    name = "host receive" if staging.on_host(target) else "receive"
                    self.places[name].add(size)
                continue
            if source is not None:
                traffic.sent += size
                if staging.on_host(source):
                    traffic.host_needed += size
                    self.places["send"].add(size)
                    if not staging.pinned(source):
                        self.places["host send"].add(size)
            else:
                if staging.on_host(target):
                    traffic.host_needed += size
                    self.places["receive"].add(size)
                    if not staging.pinned(target):
                        self.places["host receive"].add(size)
                elif piece.staged:
                    self.places["receive"].add(size)

    def carrier(self, preparation: Preparation, lane: int) -> Carrier:
        staging, traffic = preparation.staging, preparation.traffic
        places = {
            name: iter(p.parts(staging.reserve(name, lane, p.num_bytes))) if p.places else iter(())
            for name, p in self.places.items()
        }
        made = Carrier(chunk=self.chunk, device=staging.device, post=preparation.post)
        for piece, source, target in self.pieces:
            if piece.source == piece.target:
                self._within(made, piece, source, target, places, staging, traffic)
            elif source is not None:
                sent = self._packed(made, source, places, staging, traffic)
                transfers = made.first if piece.staged else made.second
                transfers.append(preparation.send(sent, piece.target))
            else:
                into = self._landing(made, piece, target, places, staging, traffic)
                transfers = made.first if piece.staged else made.second
                transfers.append(preparation.receive(into, piece.source))
        return made

    @staticmethod
    def _within(made, piece, source, target, places, staging, traffic) -> None:
        if not piece.staged:
            made.copy_second.append((target, source))
            traffic.copied += piece.num_bytes
            return
        name = "host receive" if staging.on_host(target) else "receive"
        part = next(places[name])
        made.copy_first.append((part, source))
        made.write.append((target, part))
        traffic.copied += 2 * piece.num_bytes

    @staticmethod
    def _packed(made, source, places, staging, traffic) -> torch.Tensor:
        """Where a piece is sent from: where it lies, or the send buffer for state on the host."""
        if not staging.on_host(source):
            return source
        part = next(places["send"])
        if not staging.pinned(source):
            bounce = next(places["host send"])
            made.pack_host.append((bounce, source))
            traffic.copied += source.numel()
            traffic.host += source.numel()
            source = bounce
        made.pack.append((part, source))
        traffic.copied += source.numel()
        traffic.host += source.numel()
        return part

    @staticmethod
    def _landing(made, piece, target, places, staging, traffic) -> torch.Tensor:
        """Where a piece is received: where it stays, or staging."""
        on_host = staging.on_host(target)
        if not on_host and not piece.staged:
            return target
        part = next(places["receive"])
        written = part
        if on_host:
            traffic.host += target.numel()
            if not staging.pinned(target):
                written = next(places["host receive"])
                made.fetch_host.append((written, part))
                traffic.copied += target.numel()
                traffic.host += target.numel()
        made.write.append((target, written))
        traffic.copied += target.numel()
        return part


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source, non_blocking=True)


def _post_each(transfers: list) -> list:
    """Start transfers one by one: gloo has no batches, and torch's wrappers cost more than it."""
    return [function(tensors, peer, tag) for function, tensors, peer, tag in transfers]


def _wait(works: Sequence) -> None:
    for work in works:
        work.wait()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
