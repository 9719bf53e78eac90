"""The server behind `rollout.engine`: none for the embedded engine, real SGLang for `sglang`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.config import RunConfig


@contextmanager
def rollout_server(config: RunConfig, weights: str | Path) -> Iterator[str | None]:
    """Yield the URL of the rollout server, closed at the end, or None without one."""
    if config.rollout.engine == "embedded":
        yield None
        return
    from app.local.sglang_engine import start_sglang

    with start_sglang(config, weights) as url:
        yield url
