"""A real vLLM on a Unix socket, for tests: started, waited for, and ended with all its processes.

It refuses to wait beyond a deadline, and a start that fails shows the end of the log.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

START_SECONDS = 400.0
LOOK_SECONDS = 0.5
TAIL = 4000  # characters of the log that an error shows
PLUGINS = Path(__file__).with_name("plugins")


@dataclass(frozen=True)
class Vllm:
    """A server that answers."""

    socket: Path
    model: Path  # folder of the base model
    name: str  # what the server calls it
    log: Path
    started: float  # seconds that the start took

    def get(self, path: str) -> httpx.Response:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(self.socket)), base_url="http://vllm") as client:
            return client.get(path, timeout=30)

    def metric(self, name: str) -> float:
        """The sum of a counter over all its labels."""
        lines = [line for line in self.get("/metrics").text.splitlines() if line.startswith((name + "{", name + " "))]
        assert lines, f"vLLM has no metric {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def environment() -> dict[str, str]:
    """What every vLLM here is started with: no network, no telemetry, adapters at run time.

    Half of the cores: the test itself and what runs beside it need the others, and threads that wait for a core that
    they share are slower than fewer threads.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("VLLM_", "PYTEST_"))}
    return kept | {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores[len(cores) // 2 :])),
        "VLLM_CPU_CI_ENV": "1",  # no warm-up
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(PLUGINS),
    }


@contextmanager
def serving(python: Path, model: Path, *flags: str, name: str = "base") -> Iterator[Vllm]:
    """vLLM of that interpreter with that model until the block is left. AssertionError with the log's end."""
    folder = Path(tempfile.mkdtemp(prefix="art-vllm-"))  # a socket's path must be short
    log = folder / "log"
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", name, "--uds", str(folder / "socket"), "--enforce-eager"]
    began = time.monotonic()
    with log.open("wb") as file:
        child = subprocess.Popen(
            [*command, *flags], env=environment(), cwd=folder, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            start_new_session=True,
        )  # fmt: skip
    try:
        _healthy(child, folder / "socket", log, began + START_SECONDS)
        yield Vllm(folder / "socket", model, name, log, time.monotonic() - began)
    finally:
        _end(child)
        shutil.rmtree(folder, ignore_errors=True)


def _healthy(child: subprocess.Popen[bytes], address: Path, log: Path, until: float) -> None:
    while time.monotonic() < until:
        if _answers(address):
            return
        try:
            code = child.wait(LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        raise AssertionError(f"vLLM ended with code {code}:\n{_tail(log)}")
    raise AssertionError(f"vLLM was not ready within {START_SECONDS:.0f} s:\n{_tail(log)}")


def _answers(address: Path) -> bool:
    """By hand, because httpx does not close a Unix socket that nobody listens on."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        try:
            connection.connect(str(address))
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: vllm\r\nconnection: close\r\n\r\n")
            return b" 200 " in connection.recv(64)
        except OSError:
            return False  # not yet


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-TAIL:]


def _end(child: subprocess.Popen[bytes]) -> None:
    """First politely, so that it clears up after itself; whatever is left of its group is killed."""
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            child.wait(30)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
