"""Start stock SGLang on the CPU in its own environment, wait until it answers, always close it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from app.sglang_cpu.client import is_healthy

HERE = Path(__file__).resolve().parent
DEFAULT_PYTHON = HERE.parents[1] / ".venv-sglang" / "bin" / "python"
PYTHON_VARIABLE = "ROUTEPACK_SGLANG_PYTHON"
START_SECONDS = 300.0
CLOSE_SECONDS = 5.0


class ServerError(RuntimeError):
    """The SGLang server did not start, or ended early; the message ends with its log."""


def sglang_python() -> Path:
    """Return the interpreter of the SGLang environment.

    Raises FileNotFoundError saying how to make the environment.
    """
    python = Path(os.environ.get(PYTHON_VARIABLE) or DEFAULT_PYTHON)
    if not python.exists():
        raise FileNotFoundError(
            f"no SGLang environment at {python}: make it with `bash launch/sglang_venv.sh`, or "
            f"set {PYTHON_VARIABLE} to the interpreter of one"
        )
    return python


@contextmanager
def serve(
    model: str | Path,
    *,
    context_length: int,
    max_total_tokens: int,
    max_running_requests: int = 64,
    extra: tuple[str, ...] = (),
) -> Iterator[str]:
    """Serve the checkpoint folder `model` in fp32; yield the URL of the running server.

    context_length: longest prompt plus response. max_total_tokens: tokens of all running requests
    and of the prefix cache. extra: further flags of sglang.launch_server.
    The server listens on 127.0.0.1 only and dies with this process.
    Raises FileNotFoundError without an environment, ServerError with the end of the server's log.
    """
    python = sglang_python()
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    arguments = {
        "model-path": model,
        "host": "127.0.0.1",
        "port": port,
        "device": "cpu",
        "attention-backend": "torch_native",
        "dtype": "float32",
        "context-length": context_length,
        "max-total-tokens": max_total_tokens,
        "max-running-requests": max_running_requests,
        "mem-fraction-static": 0.1,
        "log-level": "warning",
    }
    flags = [
        "--enable-return-routed-experts",
        "--skip-tokenizer-init",
        "--skip-server-warmup",
        "--sleep-on-idle",  # its scheduler would otherwise keep a core while we train
    ]
    for name, value in arguments.items():
        flags += [f"--{name}", str(value)]
    server = [str(python), "-m", "sglang.launch_server", *flags, *extra]
    with tempfile.TemporaryDirectory(prefix="routepack-sglang-") as folder:
        log = Path(folder, "server.log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-S", str(HERE / "with_parent.py"), str(os.getpid()), *server],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(Path(folder), plugins_for(model)),
                cwd=folder if Path(model).is_absolute() else None,
                start_new_session=True,
            )
        try:
            _wait(process, url, log)
            yield url
        except ServerError:
            raise
        except Exception as error:
            with suppress(subprocess.TimeoutExpired):
                process.wait(1.0)  # a broken connection shows before its process has ended
            if process.returncode is not None:
                raise ServerError(f"{_ended(process, log)}\n(noticed as: {error})") from error
            raise
        finally:
            _close(process)


def plugins_for(model: str | Path) -> str:
    """Names of our plug-ins that the checkpoint folder `model` needs."""
    config = Path(model, "config.json")
    architectures = json.loads(config.read_text())["architectures"] if config.exists() else []
    is_ling = any(name.startswith("BailingMoeV2") for name in architectures)
    return "routepack_sglang_cpu" + (",routepack_ling_scaling" if is_ling else "")


def _environment(folder: Path, plugins: str) -> dict[str, str]:
    """The server's environment: the stand-ins, one thread, and no port beyond the loopback."""
    kept = {n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "PYTHONHOME")}
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    return kept | {
        "PYTHONPATH": str(HERE / "stand_ins"),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_PLUGINS": plugins,
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{folder}/store",
        "TMPDIR": str(folder),
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait(process: subprocess.Popen, url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not is_healthy(url):
        if process.poll() is not None:
            raise ServerError(_ended(process, log))
        if time.monotonic() > deadline:
            raise ServerError(
                f"the SGLang server was not ready after {START_SECONDS:.0f} s; the end of its "
                f"log:\n{_tail(log)}"
            )
        time.sleep(0.5)


def _ended(process: subprocess.Popen, log: Path) -> str:
    return (
        f"the SGLang server ended by itself with code {process.returncode}; the end of its log:\n"
        f"{_tail(log)}"
    )


def _tail(log: Path, num_lines: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:])


def _close(process: subprocess.Popen) -> None:
    """Kill the server; its workers follow, its resource tracker cleans up, the rest is killed."""
    left_behind = _load_files(process.pid)
    process.kill()
    process.wait()
    deadline = time.monotonic() + CLOSE_SECONDS
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    for path in left_behind:
        path.unlink(missing_ok=True)


def _load_files(pid: int) -> set[Path]:
    """Shared-memory files of the server's schedulers, which SGLang never removes."""
    found = set()
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in children.read_text().split():
                maps = Path(f"/proc/{child}/maps").read_text().splitlines()
                found |= {line.split()[-1] for line in maps if "/dev/shm/sglang_loads_" in line}
    return {Path(path) for path in found}
