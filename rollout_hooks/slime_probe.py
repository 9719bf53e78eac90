"""Start-up check: do engine and router really return routed experts?

sglang-router from PyPI drops `return_routed_experts` silently, and an engine without
`--enable-return-routed-experts` ignores it; slime would notice after the first whole rollout.
"""

from __future__ import annotations

import json
import logging
import urllib.request
from collections.abc import Callable
from typing import Any, Literal

from rollout_hooks.routed_experts import CaptureError, CaptureSpec, decode

logger = logging.getLogger(__name__)

PROMPT = [1, 2, 3, 4]
INSTALL_HELP = (
    "slime's image brings a router that passes return_routed_experts on; with the one from PyPI "
    "install slime's build (docker/README.md of slime), or give the engine's own address to "
    "--sglang-router-ip/--sglang-router-port; the engine needs --use-rollout-routing-replay"
)


def post_json(url: str, payload: dict[str, Any], timeout: float = 120.0) -> Any:
    """POST JSON and read JSON."""
    request = urllib.request.Request(
        url, json.dumps(payload).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout) as response:
        return json.load(response)


def check_capture(
    url: str,
    spec: CaptureSpec,
    missing: Literal["error", "estimate"],
    post: Callable[[str, dict[str, Any]], Any] = post_json,
) -> bool:
    """Generate one token at `url` (.../generate) and decode its routing; True when it is there.

    Raises CaptureError with what to install when it is missing under `error`, and when its shape is
    not the model's under both policies.
    """
    response = post(
        url,
        {
            "input_ids": PROMPT,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
            "return_routed_experts": True,
        },
    )
    encoded = (response.get("meta_info") or {}).get("routed_experts")
    if encoded is not None:
        decode(encoded, len(PROMPT), 1, spec, "of the start-up check")
        return True
    message = f"{url} returned no routed_experts although it was asked to: {INSTALL_HELP}"
    if missing == "error":
        raise CaptureError(message)
    logger.warning("%s. Demand will be estimated", message)
    return False
