"""The servers of ``benchmarks/proxy.py``, each in a process of its own.

    python benchmarks/proxy_servers.py upstream (--uds PATH | --port N)   an engine that answers at once
    python benchmarks/proxy_servers.py floor --port N --upstream URL      the least that a proxy does: bytes through
    python benchmarks/proxy_servers.py ours --port N --folder DIR         this project's server, with such an engine

The first line on standard output is JSON and says that it is ready. The engine gives 40 tokens, with ids and logprobs
where they are asked for; it computes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import uvicorn
from art_backends.config import TrainConfig
from art_backends.server.folder import RunFolder
from art_backends.server.run import serve
from art_backends.server.supervisor import Supervisor
from starlette.requests import Request
from starlette.responses import StreamingResponse

BASE = "base"
TOKENS = 40
WORDS = [f" word{number}" for number in range(TOKENS)]


def say(**facts: Any) -> None:
    sys.stdout.write(json.dumps({"ready": True, **facts}) + "\n")
    sys.stdout.flush()


class Upstream:
    """An engine as an ASGI app, without a framework."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if scope["path"] == "/v1/chat/completions":
            asked = orjson.loads(body)
            await (self._stream(asked, send) if asked.get("stream") else self._whole(asked, send))
        elif scope["path"] == "/v1/models":
            await _json(send, 200, {"data": [{"id": BASE, "object": "model", "parent": None}]})
        elif scope["path"] == "/health":
            await _json(send, 200, {"status": "ok"})
        else:
            await _json(send, 404, {"error": {"message": "no such route", "code": "not_found"}})

    def _prompt(self, asked: dict[str, Any]) -> list[int]:
        """As many ids as a prompt of such a length has, about."""
        return list(range(3, 3 + sum(len(message["content"]) for message in asked["messages"]) // 4))

    async def _whole(self, asked: dict[str, Any], send: Any) -> None:
        prompt = self._prompt(asked)
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": "".join(WORDS)},
            "finish_reason": "stop",
        }
        reply: dict[str, Any] = {"id": "c", "object": "chat.completion", "created": 1, "model": asked["model"]}
        if asked.get("return_token_ids"):
            choice["token_ids"] = list(range(TOKENS))
            reply["prompt_token_ids"] = prompt
        if asked.get("logprobs"):
            choice["logprobs"] = {"content": [_logprob(number) for number in range(TOKENS)]}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": TOKENS, "total_tokens": len(prompt) + TOKENS}
        await _json(send, 200, {**reply, "choices": [choice], "usage": usage})

    async def _stream(self, asked: dict[str, Any], send: Any) -> None:
        head = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        base: dict[str, Any] = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": asked["model"]}
        prompt = self._prompt(asked)

        async def event(data: bytes) -> None:
            await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})

        first = {**base, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
        if asked.get("return_token_ids"):
            first["prompt_token_ids"] = prompt
        await event(orjson.dumps(first))
        for number, word in enumerate(WORDS):
            choice: dict[str, Any] = {"index": 0, "delta": {"content": word}, "finish_reason": None}
            if asked.get("return_token_ids"):
                choice["token_ids"] = [number]
            if asked.get("logprobs"):
                choice["logprobs"] = {"content": [_logprob(number)]}
            await event(orjson.dumps({**base, "choices": [choice]}))
        await event(orjson.dumps({**base, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}))
        if (asked.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": len(prompt), "completion_tokens": TOKENS, "total_tokens": len(prompt) + TOKENS}
            await event(orjson.dumps({**base, "choices": [], "usage": usage}))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


def _logprob(number: int) -> dict[str, Any]:
    return {"token": WORDS[number], "logprob": -0.5, "bytes": list(WORDS[number].encode()), "top_logprobs": []}


async def _json(send: Any, status: int, value: Any) -> None:
    content = orjson.dumps(value)
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": content})


class Floor:
    """Starlette's level: a request's bytes to the upstream, the answer's bytes back as they come."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), read_bufsize=256 * 1024)
        request = Request(scope, receive)
        reply = await self._session.post(
            self._upstream + scope["path"],
            data=await request.body(),
            headers={"content-type": "application/json", "accept-encoding": "identity"},
        )
        kept = {"content-type": reply.headers["content-type"]}
        if "content-length" in reply.headers:
            kept["content-length"] = reply.headers["content-length"]
        await StreamingResponse(reply.content.iter_any(), reply.status, kept)(scope, receive, send)


def run(app: Any, options: argparse.Namespace) -> None:
    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            say(digest="benchmark")

    listens = {"uds": str(options.uds)} if options.uds else {"host": "127.0.0.1", "port": options.port}
    Server(uvicorn.Config(app, lifespan="off", log_level="critical", ws="none", access_log=False, **listens)).run()


async def ours(options: argparse.Namespace) -> None:
    def worker(_: TrainConfig, folder: RunFolder) -> Supervisor:
        command = [sys.executable, str(Path(__file__)), "upstream"]
        return Supervisor(command, log_file=folder.path / "logs" / "worker.log", start_deadline=60)

    config = TrainConfig(folder=options.folder, base_model="none", limits={"queue": 10_000})  # type: ignore[arg-type]
    await serve(config, port=options.port, make_worker=worker, on_ready=lambda url: say(url=url), exit_with_parent=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["upstream", "floor", "ours"])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--uds", type=Path)
    parser.add_argument("--upstream")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.kind == "ours":
        asyncio.run(ours(options))
    else:
        run(Upstream() if options.kind == "upstream" else Floor(options.upstream), options)


if __name__ == "__main__":
    main()
