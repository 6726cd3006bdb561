"""An OpenAI-compatible server on loopback that remembers what it was asked, for the capture tests.

`tests/art_langgraph` uses it too. This server is real HTTP, so that keys, hosts and connections are seen
as a provider would see them.
"""

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


@dataclass
class Seen:
    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: dict

    @property
    def token(self) -> str:
        return self.headers.get("authorization", "").removeprefix("Bearer ")

    @property
    def prompt(self) -> str:
        return str(self.body["messages"][-1]["content"])


@dataclass
class FakeOpenAI:
    url: str = ""
    seen: list[Seen] = field(default_factory=list)
    fail_next: list[int] = field(default_factory=list)  # statuses to answer first
    gate: int = 0  # answer nobody before this many requests are waiting: real concurrency, without sleeping

    reply: Callable[[dict], dict | None] | None = None  # a message of the test's own for a body

    def __post_init__(self) -> None:
        self._waiting: list[asyncio.Event] = []

    def release(self) -> None:
        """Let everybody go who still waits at the gate (from another thread)."""
        self.gate = 0
        for waiting in self._waiting:
            self._loop.call_soon_threadsafe(waiting.set)

    async def answer(self, request: Request) -> Response:
        self._loop = asyncio.get_running_loop()
        raw = await request.body()
        body = json.loads(raw) if raw else {}
        self.seen.append(Seen(request.method, request.url.path, request.url.query, dict(request.headers), body))
        if self.fail_next:
            return JSONResponse({"error": {"message": "again"}}, self.fail_next.pop(0), headers={"retry-after-ms": "1"})
        if self.gate > 1:
            event = asyncio.Event()
            self._waiting.append(event)
            if len(self._waiting) >= self.gate:
                for waiting in self._waiting:
                    waiting.set()
                self._waiting.clear()
            await event.wait()
        if request.url.path.endswith("/embeddings"):
            return JSONResponse({"object": "list", "data": [{"index": 0, "embedding": [0.0], "object": "embedding"}]})
        if request.method == "GET":
            return JSONResponse({"object": "list", "data": []})
        if self.reply and (message := self.reply(body)):
            return JSONResponse(self._completion(body, message, ""))
        said = f"echo {body['messages'][-1]['content']}" if "messages" in body else "text"
        if body.get("stream"):
            return StreamingResponse(self._stream(said), media_type="text/event-stream")
        return JSONResponse(self._completion(body, {"role": "assistant", "content": said}, said))

    def _completion(self, body: dict, message: dict, text: str) -> dict:
        return {
            "id": "c",
            "object": "chat.completion",
            "created": 0,
            "model": body.get("model", "m"),
            "choices": [{"index": 0, "message": message, "text": text, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }

    async def _stream(self, said: str):
        for number, word in enumerate(said.split(" ")):
            delta = {"role": "assistant", "content": word if number == 0 else " " + word}
            chunk = {
                "id": "c",
                "object": "chat.completion.chunk",
                "created": 0,
                "model": "m",
                "choices": [{"index": 0, "delta": delta, "finish_reason": None}],
            }
            yield f"data: {json.dumps(chunk)}\n\n"
        chunk["choices"] = [{"index": 0, "delta": {}, "finish_reason": "stop"}]
        yield f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()

    async def startup(self, sockets=None) -> None:
        await super().startup(sockets)
        self.ready.set()


def serve(fake: FakeOpenAI):
    app = Starlette(routes=[Route("/{path:path}", fake.answer, methods=["GET", "POST", "DELETE"])])
    server = _Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert server.ready.wait(20)
    port = server.servers[0].sockets[0].getsockname()[1]
    fake.url = f"http://127.0.0.1:{port}"
    yield fake
    server.should_exit = True
    thread.join(20)


@pytest.fixture
def proxy():
    """Plays our proxy."""
    yield from serve(FakeOpenAI())


@pytest.fixture
def provider():
    """Plays api.openai.com."""
    yield from serve(FakeOpenAI())


@pytest.fixture
def captured():
    from art_backends import capture

    with capture.installed():
        yield
    assert not capture.is_installed()
