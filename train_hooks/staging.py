"""Staging: the buffers that pieces pass through, two lanes of them, bounded together."""

from __future__ import annotations

from collections.abc import Callable

import torch

NUM_LANES = 2
ALIGNMENT = 16


class Staging:
    """Byte buffers of one rank, at most `num_bytes` of them on the device.

    Two lanes of a receive buffer, so that one chunk is carried while another is written. State on
    the host of a CUDA job (optimizer offload, host copies) is sent from a send buffer on the
    device, filled straight from pinned memory and through a pinned buffer from other memory.
    `on_host` and `pinned` say which tensor is which, for tests.
    """

    def __init__(
        self,
        num_bytes: int,
        device: torch.device,
        *,
        on_host: Callable[[torch.Tensor], bool] | None = None,
        pinned: Callable[[torch.Tensor], bool] | None = None,
    ):
        if num_bytes < 1:
            raise ValueError(f"staging of {num_bytes} bytes: expected at least 1 (staging_mb)")
        buffers = 1 if device.type == "cpu" and on_host is None else 2  # to receive, and to send
        self.chunk_bytes = max(1, num_bytes // (buffers * NUM_LANES))
        self.device = device
        self.on_host = on_host or (lambda tensor: tensor.device != self.device)
        self.pinned = pinned or (lambda tensor: tensor.is_pinned())
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}

    def reserve(self, name: str, lane: int, num_bytes: int) -> torch.Tensor:
        """The lane's buffer `name`, at least `num_bytes` of uint8; `host` buffers are pinned."""
        held = self._buffers.get((name, lane))
        if held is None or held.numel() < num_bytes:
            on_host = name.startswith("host")
            self._buffers.pop((name, lane), None)
            held = torch.empty(
                max(num_bytes, 1),
                dtype=torch.uint8,
                device="cpu" if on_host else self.device,
                pin_memory=on_host and self.device.type == "cuda",
            )
            self._buffers[name, lane] = held
        return held

    def release(self) -> None:
        """Give every buffer back: before a sleep that would copy them to the host."""
        self._buffers.clear()

    @property
    def num_bytes(self) -> int:
        """Bytes that the buffers on the device take now."""
        return sum(b.numel() for (name, _), b in self._buffers.items() if name[:4] != "host")


class Places:
    """Places in one buffer, one after the other, aligned."""

    def __init__(self) -> None:
        self.places: list[tuple[int, int]] = []
        self.num_bytes = 0

    def add(self, num_bytes: int) -> int:
        """Take the next `num_bytes`; returns the place's number."""
        self.places.append((self.num_bytes, num_bytes))
        self.num_bytes += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return len(self.places) - 1

    def parts(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The places as views of `buffer`."""
        return [buffer[start : start + size] for start, size in self.places]
