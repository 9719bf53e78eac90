"""sglang_router by three endpoints: engines register at /workers, everything else goes to one.

PyPI's own router drops `return_routed_experts`; slime's build of it is not on PyPI.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import urllib.request

from slime_on_cpu.engine import serve
from slime_on_cpu.with_parent import end_with_parent


def start_router() -> int:
    """Start the router in a process of its own; returns its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.get_context("spawn").Process(target=_run, args=(port,), daemon=True).start()
    return port


def _run(port: int) -> None:
    end_with_parent()
    urls: list[str] = []

    def get(path: str) -> dict:
        if path == "/workers":
            return {"workers": [{"url": url, "id": str(i)} for i, url in enumerate(urls)]}
        return {}

    def post(path: str, request: dict) -> dict:
        if path == "/workers":
            urls.append(request["url"])
            return {}
        body = json.dumps(request).encode()
        passed = urllib.request.Request(urls[0] + path, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(passed) as response:
            return json.load(response)

    serve(port, get, post).serve_forever()
