"""SGLang's HTTP endpoints with the standard library: JSON out, JSON in, errors by name."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class RequestError(RuntimeError):
    """The server refused a request or broke off; the message names endpoint and reason."""


def post(url: str, endpoint: str, payload: dict[str, Any], timeout: float = 600.0) -> Any:
    """Send `payload` to `url/endpoint` and return its JSON (its text where it is not JSON).

    Raises RequestError with the server's own words for any other status than 200.
    """
    with _open(url, endpoint, payload, timeout) as response:
        text = response.read().decode()
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def stream(url: str, payload: dict[str, Any], timeout: float = 600.0) -> Iterator[dict[str, Any]]:
    """Yield every chunk of a streamed `/generate`."""
    with _open(url, "generate", payload | {"stream": True}, timeout) as response:
        for line in response:
            text = line.decode().strip().removeprefix("data: ")
            if text == "[DONE]":
                return
            if text:
                yield json.loads(text)


def is_healthy(url: str) -> bool:
    """Whether the server has loaded its model and generates; False while it starts."""
    try:
        with _DIRECT.open(f"{url}/health", timeout=60.0) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _open(url: str, endpoint: str, payload: dict[str, Any], timeout: float):
    request = urllib.request.Request(
        f"{url}/{endpoint}", json.dumps(payload).encode(), {"Content-Type": "application/json"}
    )
    try:
        return _DIRECT.open(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        reason = error.read().decode(errors="replace")[:500]
        raise RequestError(f"SGLang refused /{endpoint} ({error.code}): {reason}") from error
    except OSError as error:
        raise RequestError(f"SGLang did not answer /{endpoint} at {url}: {error}") from error
