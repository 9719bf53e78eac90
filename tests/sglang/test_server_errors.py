"""A server that cannot start, ends early, loses its parent or hides the routing; all pretended."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from app.local.sglang_engine import SglangEngine, WeightUpdateError, check_capture
from app.sglang_cpu.client import RequestError, post
from app.sglang_cpu.server import PYTHON_VARIABLE, ServerError, serve
from rollout_hooks.routed_experts import CaptureError, CaptureSpec

ROOT = Path(__file__).resolve().parents[2]
SPEC = CaptureSpec(num_hidden_layers=4, moe_layers=(1, 2, 3), num_experts=16, top_k=4)


def pretended_python(folder: Path, script: str) -> str:
    """A program that takes the place of the SGLang environment's interpreter."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_missing_environment_names_the_script_that_makes_it(tmp_path, monkeypatch):
    monkeypatch.setenv(PYTHON_VARIABLE, str(tmp_path / "nowhere"))
    with (
        pytest.raises(FileNotFoundError, match=r"launch/sglang_venv\.sh"),
        serve(tmp_path, context_length=64, max_total_tokens=64),
    ):
        pass


def test_a_server_that_ends_early_shows_its_log(tmp_path, monkeypatch):
    python = pretended_python(tmp_path, "echo no such model architecture; exit 3")
    monkeypatch.setenv(PYTHON_VARIABLE, python)
    with (
        pytest.raises(ServerError, match=r"code 3(.|\n)*no such model architecture"),
        serve(tmp_path, context_length=64, max_total_tokens=64),
    ):
        pass


PRETENDED_SERVER = """
import sys, os
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        print("out of memory", flush=True)
        os._exit(4)
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_a_server_that_ends_while_it_is_used_shows_its_log(tmp_path, monkeypatch):
    script = tmp_path / "server.py"
    script.write_text(PRETENDED_SERVER)
    python = pretended_python(tmp_path, f'exec {sys.executable} {script} "$@"')
    monkeypatch.setenv(PYTHON_VARIABLE, python)
    with (
        pytest.raises(ServerError, match=r"code 4(.|\n)*out of memory(.|\n)*did not answer"),
        serve(tmp_path, context_length=64, max_total_tokens=64) as url,
    ):
        post(url, "generate", {})


def test_the_server_dies_with_its_parent(tmp_path):
    pid_file = tmp_path / "pid"
    python = pretended_python(tmp_path, f"echo $$ > {pid_file}; exec sleep 300")
    script = (
        "from app.sglang_cpu.server import serve\n"
        f"with serve({str(tmp_path)!r}, context_length=64, max_total_tokens=64): pass\n"
    )
    environment = os.environ | {
        PYTHON_VARIABLE: python,
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(tmp_path),
    }
    parent = subprocess.Popen([sys.executable, "-c", script], env=environment)
    try:
        wait_for(lambda: pid_file.exists() and pid_file.read_text().strip())
        server = int(pid_file.read_text())
        assert is_alive(server)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    wait_for(lambda: not is_alive(server))


def wait_for(condition, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return "(sleep) Z" not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


@pytest.fixture
def router():
    """A router that drops `routed_experts` from every answer, as the one from PyPI does."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            refused = self.path != "/generate"
            tokens = [[-1.0, 5, None], [-1.0, 6, None]]
            body = {"success": False, "message": "no such tensor"} if refused else {}
            body |= {"output_ids": [5, 6], "meta_info": {"output_token_logprobs": tokens}}
            self.send_response(404 if self.path == "/nowhere" else 200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_start_up_check_says_what_hides_the_routing(router):
    with pytest.raises(CaptureError, match=r"start-up check(.|\n)*sglang-router from PyPI drops"):
        check_capture(router, SPEC)


def test_refused_weights_are_an_error(router):
    class Checkpoint:
        def load_state_dict(self, tensors):
            pass

        def save_pretrained(self, folder):
            pass

    with pytest.raises(WeightUpdateError, match="no such tensor"):
        SglangEngine(router, Checkpoint()).update_weights({})


def test_a_refused_request_carries_the_servers_words(router):
    with pytest.raises(RequestError, match=r"/nowhere \(404\).*no such tensor"):
        post(router, "nowhere", {})


def test_no_server_is_a_request_error(router):
    with pytest.raises(RequestError, match="did not answer"):
        post("http://127.0.0.1:9", "generate", {})
