"""vLLM as a child, and vLLM servers elsewhere, with stand-ins that can be told to fail: who is asked what, and when.

Row R21: a version is loaded under its own name; what was loaded is there again when the engine is.
"""

import asyncio
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from art_backends.errors import ConfigError, ServerError, TrainingError
from art_backends.server import supervisor

FAKE = Path(__file__).with_name("fake_worker.py")


class Engine:
    """A stand-in for vLLM in its folder of faults."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def command(self, *more: str) -> str:
        return shlex.join([sys.executable, str(FAKE), "--as-vllm", "--faults", str(self.folder), *more, "serve"])

    def fault(self, name: str, times: int = 1) -> None:
        (self.folder / name).write_text(str(times))

    @property
    def place(self) -> dict[str, Any]:
        return json.loads((self.folder / "place.json").read_text())

    @property
    def events(self) -> list[str]:
        file = self.folder / "events.log"
        return [line for line in file.read_text().splitlines() if not line.endswith(" Hello")] if file.exists() else []

    @contextlib.asynccontextmanager
    async def http(self) -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.AsyncHTTPTransport(uds=self.place["uds"])
        async with httpx.AsyncClient(base_url="http://engine", transport=transport, timeout=30) as client:
            yield client

    async def loaded(self) -> list[str]:
        async with self.http() as http:
            return [model["id"] for model in (await http.get("/v1/models")).json()["data"] if model["parent"]]

    async def release(self, name: str) -> None:
        async with self.http() as http:
            await http.post(f"/test/release/{name}")

    async def held(self, name: str) -> None:
        async with self.http() as http:
            await http.get(f"/test/held/{name}")


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 0.01)
    return Engine(tmp_path / "engine")


async def test_calls_go_to_vllm_and_steps_to_the_worker(start: Any, engine: Engine) -> None:
    settings = {"engine": "vllm", "vllm": engine.command(), "vllm_args": "--max-num-seqs 7", "rank": 12}
    async with start(settings) as server:
        ids = await server.collect(1)
        outcome = await server.client.train_step(1, server.config, rollout_ids=ids)
        assert (outcome.kind, outcome.version) == ("committed", 1)
        assert await engine.loaded() == ["policy@1"]
        assert await server.loaded() == []
        assert (await server.policy())["capture"] == "tokens"
        reply = await server.chat(server.agent, "who?")
        assert reply.json()["choices"][0]["message"]["content"] == "policy@1 says who?"
        children = (await server.client.status())["children"]
        assert [(child["name"], child["state"]) for child in children] == [("worker", "up"), ("vLLM", "up")]
        options = engine.place["options"]
        assert options[:3] == ["serve", "/no/model", "--served-model-name"]
        for words in (["--max-lora-rank", "16"], ["--tool-call-parser", "hermes"], ["--max-num-seqs", "7"]):
            assert words[1] == options[options.index(words[0]) + 1]
        template = options[options.index("--chat-template") + 1]
        assert template == str(server.folder / "chat_template.jinja")
        assert engine.place["variables"]["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
        assert "VLLM_SERVER_DEV_MODE" not in engine.place["variables"]
        pid = engine.place["pid"]
    await gone(pid)


async def test_a_killed_vllm_comes_back_with_its_adapters_and_calls_wait(start: Any, engine: Engine) -> None:
    async with start({"engine": "vllm", "vllm": engine.command()}) as server:
        ids = await server.collect(1)
        await server.client.train_step(1, server.config, rollout_ids=ids)
        old = engine.place["pid"]
        os.kill(old, signal.SIGKILL)
        await gone(old)
        async with asyncio.timeout(60):
            while (reply := await server.chat(server.agent, "still there?")).status_code != 200:
                assert reply.status_code in (502, 503)  # until the server has noticed
        assert reply.json()["choices"][0]["message"]["content"] == "policy@1 says still there?"
        await server.restarted("vLLM")
        assert engine.place["pid"] != old
        assert await engine.loaded() == ["policy@1"]


async def test_vllm_sleeps_while_a_step_trains_and_calls_wait(start: Any, engine: Engine) -> None:
    async with start({"engine": "vllm", "vllm": engine.command(), "vllm_sleep": True}) as server:
        assert engine.place["variables"]["VLLM_SERVER_DEV_MODE"] == "1"
        ids = await server.collect(1)
        engine.fault("hold_call")
        server.fault("hold_job")
        in_flight = asyncio.create_task(server.chat(server.agent, "hold"))
        await engine.held("call")
        await server.client.start_step(1, server.config, rollout_ids=ids)
        assert "sleep level=1" not in engine.events, "a call is in flight"
        await engine.release("call")
        assert (await in_flight).status_code == 200
        await server.engine.get("/test/held/job")
        assert engine.events[-2:] == ["held call ends", "sleep level=1"]
        during = [asyncio.create_task(server.chat(server.agent, "during")) for _ in range(5)]
        assert (await server.client.status())["step_running"] == 1
        assert not (await asyncio.wait(during, timeout=0.3))[0]
        await server.engine.post("/test/release/job")
        assert {(await task).status_code for task in during} == {200}
        asked = [event for event in engine.events if event.endswith(("wake", "during"))]
        assert asked == ["wake", *["chat base-model during"] * 5]
        report = await server.client.step_report(1, "policy", wait=30)
        assert report.outcome is not None
        assert report.outcome.kind == "committed"


async def test_a_vllm_that_does_not_wake_is_replaced(
    start: Any, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    async with start({"engine": "vllm", "vllm": engine.command(), "vllm_sleep": True}) as server:
        ids = await server.collect(1)
        engine.fault("refuse_wake")
        outcome = await server.client.train_step(1, server.config, rollout_ids=ids)
        assert (outcome.kind, outcome.version) == ("committed", 1)
        await server.restarted("vLLM")
        assert await engine.loaded() == ["policy@1"]
        assert (await server.chat(server.agent, "hi")).status_code == 200
    assert "DID NOT WAKE UP after a step (HTTP 500" in caplog.text


async def test_a_vllm_that_cannot_sleep_is_said(start: Any, engine: Engine) -> None:
    async with start({"engine": "vllm", "vllm": engine.command(), "vllm_sleep": True}) as server:
        ids = await server.collect(1)
        engine.fault("refuse_sleep")
        with pytest.raises(TrainingError, match=r"vLLM did not go to sleep .*\(HTTP 404: .*train without vllm_sleep"):
            await server.client.train_step(1, server.config, rollout_ids=ids)
        assert (await server.chat(server.agent, "hi")).status_code == 200
        outcome = await server.client.train_step(1, server.config, rollout_ids=ids)
        assert outcome.version == 1


async def test_without_an_environment_the_command_that_makes_one_is_said(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ART_INPLACE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=r"no environment .* make it with `art-backends vllm install`"):
        async with start({"engine": "vllm"}):
            pass
    with pytest.raises(ConfigError, match=r"vllm: there is no program '/no/python'"):
        async with start({"engine": "vllm", "vllm": "/no/python"}):
            pass
    with pytest.raises(ConfigError, match=r"rank: vLLM serves adapters of rank 512 at most, not 600"):
        async with start({"engine": "vllm", "vllm": sys.executable, "rank": 600}):
            pass


async def test_a_vllm_that_does_not_start_says_why(start: Any, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys; sys.exit('api_server.py: error: unrecognized arguments: --no-such-thing')")
    with pytest.raises(ConfigError, match=r"vllm_args: this vLLM has no option --no-such-thing; end of its log:"):
        async with start({"engine": "vllm", "vllm": f"{sys.executable} {program}"}):
            pass
    program.write_text("import sys; sys.exit('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB')")
    with pytest.raises(ServerError, match=r"not enough memory: lower --gpu-memory-utilization"):
        async with start({"engine": "vllm", "vllm": f"{sys.executable} {program}"}):
            pass


# ---- servers elsewhere


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Stand-ins on ports of their own; gives the address of a new one, or of one that is killed and begun anew."""
    children: list[subprocess.Popen[str]] = []
    at: dict[str, subprocess.Popen[str]] = {}

    def begin(*more: str, anew: str = "") -> str:
        folder = tmp_path / f"elsewhere{len(children)}"
        folder.mkdir()
        if anew:
            at[anew].kill()
            at[anew].wait()
        port = int(anew.rpartition(":")[2]) if anew else free_port()
        words = [sys.executable, str(FAKE), "--as-vllm", "--faults", str(folder), "--port", str(port), *more]
        child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline()
        at[f"http://127.0.0.1:{port}"] = child
        return f"http://127.0.0.1:{port}"

    yield begin
    for child in children:
        child.kill()
        child.communicate()


async def test_servers_elsewhere_are_asked_and_given_the_adapters(start: Any, elsewhere: Callable[..., str]) -> None:
    url = elsewhere()
    async with start({"engine_url": [url]}) as server:
        ids = await server.collect(1)
        outcome = await server.client.train_step(1, server.config, rollout_ids=ids)
        assert outcome.version == 1
        reply = await server.chat(server.agent, "who?")
        assert reply.json()["choices"][0]["message"]["content"] == "policy@1 says who?"
        assert await server.loaded() == [], "the worker is asked for steps alone"
        status = await server.client.status()
        assert [child["name"] for child in status["children"]] == ["worker"]
        assert [(one["name"], one["state"]) for one in status["replicas"]] == [(url, "up")]
    async with httpx.AsyncClient(trust_env=False) as http:
        assert (await http.get(f"{url}/v1/models")).status_code == 200, "nobody ends what was not started here"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--renders", "text"), r"turns a text into other tokens than fake does: it serves another model"),
        (("--renders", "messages"), r"renders a conversation into other tokens than the chat template in force here"),
        (
            ("--max-model-len", "1000"),
            r"serves sequences of 1000 tokens, 4096 are asked for: start it with --max-model-",
        ),
    ],
)
async def test_a_server_that_does_not_fit_is_refused(
    start: Any, elsewhere: Callable[..., str], more: tuple[str, ...], words: str
) -> None:
    url = elsewhere(*more)
    with pytest.raises(ConfigError, match=f"{url} {words}"):
        async with start({"engine_url": [url]}):
            pass


async def test_a_server_that_returns_as_another_model_takes_no_calls(start: Any, elsewhere: Callable[..., str]) -> None:
    urls = [elsewhere(), elsewhere()]
    async with start({"engine_url": urls}) as server:
        ids = await server.collect(1)
        await server.client.train_step(1, server.config, rollout_ids=ids)
        for begun, state, why in (("messages", "out", "renders a conversation into other tokens"), ("", "up", "")):
            elsewhere("--renders", begun, anew=urls[1])
            async with asyncio.timeout(60):
                while True:
                    assert (await server.chat(server.agent, "hi")).status_code == 200
                    one = (await server.client.status())["replicas"][1]
                    if one["state"] == state and why in (one["why"] or ""):
                        break
        async with httpx.AsyncClient(trust_env=False) as http:
            models = (await http.get(f"{urls[1]}/v1/models")).json()["data"]
        assert "policy@1" in [model["id"] for model in models]


async def test_wrong_addresses(start: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"engine_url: http://127.0.0.1:\d+ cannot be reached: start vLLM there first"
    ):
        async with start({"engine_url": [f"http://127.0.0.1:{free_port()}"]}):
            pass
    with web_page() as url, pytest.raises(ConfigError, match=f"engine_url: {url} is no vLLM server: "):
        async with start({"engine_url": [url]}):
            pass


@contextlib.contextmanager
def web_page() -> Iterator[str]:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *_: Any) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Page) as page:
        thread = threading.Thread(target=page.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{page.server_port}"
        finally:
            page.shutdown()
            thread.join()


def free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


async def gone(pid: int) -> None:
    """Wait until a process, a child of ours or not, has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        async with asyncio.timeout(30):
            await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
