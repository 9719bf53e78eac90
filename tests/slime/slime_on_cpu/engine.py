"""SGLang by its HTTP endpoints, without a model: answers are drawn, weights are kept and written.

slime's own engine actor starts `launch_server` in a process of its own, registers it at the router
(`slime_on_cpu.router`) and talks to it by HTTP alone. Every answer depends only on the prompt and
on how often it was asked. Two prompts are special by their last token: SLOW is unanswered until the
engine was told to abort, then half of it comes back; DULL is never rewarded (`rewards.py`).
"""

from __future__ import annotations

import base64
import json
import os
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

SLOW, DULL = 99, 98
NUM_PROMPT = 3
NUM_LAYERS, NUM_EXPERTS, TOP_K, VOCAB = 2, 8, 2, 96
SHARES = np.array([8.0, 6, 1, 1, 1, 1, 1, 1]) / 20


class Engine:
    """State of one server: weights by name, their version, and who waits for an abort."""

    def __init__(self, model_path: str):
        from slime_on_cpu.engine_weights import EngineWeights

        self.weights = EngineWeights(model_path)
        self.asked: Counter[tuple[int, ...]] = Counter()
        self.lock = threading.Lock()
        self.aborted = threading.Condition(self.lock)
        self.num_waiting = self.num_aborts = 0

    def generate(self, request: dict) -> dict:
        """`/generate` with `input_ids`, in SGLang's response format."""
        prompt = tuple(request["input_ids"])
        with self.lock:
            number = self.asked[prompt[:NUM_PROMPT]]
            self.asked[prompt[:NUM_PROMPT]] += 1
        rng = np.random.default_rng([number, *prompt])
        num_new = min(int(rng.integers(6, 40)), request["sampling_params"]["max_new_tokens"])
        tokens = rng.integers(2, VOCAB, num_new)
        tokens[-1] = 2 + number % 2  # what rewards.py reads: half of a group is right
        reason = {"type": "stop"}
        if prompt[-1] == SLOW:
            with self.lock:
                self.num_waiting += 1
                self.aborted.wait_for(lambda: self.num_aborts)
                self.num_waiting -= 1
            tokens, reason = tokens[: max(1, num_new // 2)], {"type": "abort"}
        num_rows = len(prompt) + len(tokens) - 1
        routed = np.stack(
            [
                [rng.choice(NUM_EXPERTS, TOP_K, False, SHARES) for _ in range(NUM_LAYERS)]
                for _ in range(num_rows)
            ]
        )
        meta = {
            "finish_reason": reason,
            "output_token_logprobs": [[-5.5, int(token), None] for token in tokens],
            "prompt_tokens": len(prompt),
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
            "weight_version": self.weights.version,
        }
        if request.get("return_routed_experts"):
            meta["routed_experts"] = base64.b64encode(routed.astype(np.int32).tobytes()).decode()
        return {"text": " ".join(f"t{token}" for token in tokens), "meta_info": meta}

    def abort_request(self, request: dict) -> dict:
        with self.lock:
            self.num_aborts += 1
            self.aborted.notify_all()
        return {}

    def get(self, path: str) -> dict:
        if path.startswith("/v1/loads"):
            return {"num_reqs": self.num_waiting}
        if path == "/get_weight_version":
            return {"weight_version": self.weights.version}
        return {}

    def post(self, path: str, request: dict) -> dict:
        """Answer an endpoint; those about memory and generation have nothing to do here."""
        name = path.strip("/")
        owner = self if name in ("generate", "abort_request") else self.weights
        answer = getattr(owner, name, None)
        return {"success": True} if answer is None else answer(request)


def serve(port: int, get, post, host: str = "0.0.0.0") -> ThreadingHTTPServer:
    """An HTTP server of JSON: `get(path)` and `post(path, request)` return what is sent back."""

    class Handler(BaseHTTPRequestHandler):
        def _send(self, answer, code: int = 200) -> None:
            body = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            self._send(get(self.path))

        def do_POST(self):
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            try:
                self._send(post(self.path, json.loads(raw or b"{}") or {}))
            except Exception as error:
                self._send({"error": repr(error)}, 500)
                raise

        def log_message(self, *arguments):
            pass

    return ThreadingHTTPServer((host, port), Handler)


def launch_server(server_args) -> None:
    """What `sglang.srt.entrypoints.http_server.launch_server` is to slime; never returns."""
    from slime_on_cpu.with_parent import end_with_parent

    end_with_parent()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    engine = Engine(server_args.model_path)
    serve(server_args.port, engine.get, engine.post).serve_forever()
