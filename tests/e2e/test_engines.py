"""Whole runs with the engine in a process of its own: the same commands, the same folder, another engine.

In vLLM's place answers a program that takes its command line and speaks its protocol with the embedded engine: all that
is ours on the way to vLLM is in it. The real one is in tests/vllm.
"""

from __future__ import annotations

import json
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
STAND_IN = Path(__file__).with_name("standin_vllm.py")


@pytest.fixture
def elsewhere(project: Any, waiting: Callable[..., Any]) -> Iterator[str]:
    """The address of a server that nobody of ours started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    words = [sys.executable, str(STAND_IN), "serve", str(project.model), "--served-model-name", "any-name"]
    server = subprocess.Popen([*words, "--port", str(port)])
    url = f"http://127.0.0.1:{port}"
    try:
        waiting(lambda: well(url) or server.poll() is not None, 120)
        assert server.poll() is None
        yield url
        assert server.poll() is None, "it was ended by somebody"
    finally:
        server.kill()
        server.wait()


def well(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).is_success
    except httpx.TransportError:
        return False


def check(project: Any, wanted: dict[str, Any]) -> None:
    """Three steps were made, of exact calls, by a sampler that the trainer agrees with."""
    state = project.state(3)
    assert {name: state["config"][name] for name in wanted} == wanted
    assert state["metrics"]["sampling/kl"] < 1e-6
    assert state["metrics"]["sampling/ratio/max"] < 1.01
    assert state["metrics"]["ess"] > 0.999
    kept = json.loads((project.run / "policy.json").read_text())
    assert kept["engine"] == "vllm"


def test_a_run_on_a_server_elsewhere(project: Any, elsewhere: str) -> None:
    done = project.call("art-langgraph", *project.training("--engine-url", elsewhere), seconds=300)
    assert done.code == 0, done.err
    assert "3 steps, 18 rollouts (0 excluded)" in done.out
    check(project, {"engine": "vllm", "engine_url": [elsewhere]})
    names = {model["id"] for model in httpx.get(f"{elsewhere}/v1/models", trust_env=False).json()["data"]}
    assert "policy@3" in names
    # the same folder goes on with the embedded engine, from the same version
    more = project.call("art-langgraph", *project.training("--engine", "embedded", "--steps", "4"), seconds=300)
    assert more.code == 0, more.err
    assert project.state(4)["config"]["engine"] == "embedded"


def test_a_run_on_a_vllm_that_is_started_here(project: Any, waiting: Callable[..., Any]) -> None:
    command = shlex.join([sys.executable, str(STAND_IN), "serve"])
    words = project.training("--engine", "vllm", "--vllm", command, "--max-sampler-kl", "0.001")
    done = project.call("art-langgraph", *words, seconds=300)
    assert done.code == 0, done.err
    assert "3 steps, 18 rollouts (0 excluded)" in done.out
    check(project, {"engine": "vllm", "vllm": command, "max_sampler_kl": 0.001})
    assert (project.run / "chat_template.jinja").exists()
    project.gone()
    serving = project.start("art-backends", "serve", "--folder", "run", "--port", "0", "--threads", "1")
    file = project.run / "server.json"
    waiting(lambda: file.exists() or serving.poll() is not None, 120)
    assert serving.poll() is None, serving.communicate()[1]
    status = project.ask("/status")
    assert [child["name"] for child in status["children"]] == ["worker", "vLLM"], "as the run was"
    assert status["policies"][0]["version"] == 3
    serving.send_signal(signal.SIGTERM)
    assert serving.wait(60) == 0
    project.gone()
