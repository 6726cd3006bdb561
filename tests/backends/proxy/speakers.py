"""Every dialect by hand: what its clients send, and how they read what comes back, to the last byte.

A fault must look alike to a client of any dialect; so a test asks as each ``Speaker`` and looks at its ``Heard``.
"""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from art_backends.proxy.sse import DONE, Event, Splitter

from tests.backends.proxy.fake_engine import WAIT, Behaviour, World, chunks, ids_of, logprobs_of, send_json, sse


@dataclass
class Heard:
    """An answer as it arrived. ``whole``: it ended as HTTP says that answers end."""

    speaker: "Speaker"
    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool

    @property
    def streamed(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Event]:
        return Splitter().feed(self.body)

    @property
    def items(self) -> list[Any]:
        """What the events of a stream say."""
        return [json.loads(event.data) for event in self.events if event.data not in (None, DONE)]

    @property
    def said(self) -> str:
        """The text, put together."""
        if self.streamed:
            return "".join(self.speaker.part(item) for item in self.items)
        return self.speaker.text(self.json)

    @property
    def ended(self) -> bool:
        """Whether a client takes it for an answer that is whole."""
        if not self.streamed:
            return self.whole and self.status == 200
        last = [event for event in self.events if event.data is not None][-1:]
        return bool(last) and (last[0].data == DONE or last[0].name in ENDS)

    @property
    def errors(self) -> list[str]:
        """The messages of errors, of a status or inside a stream."""
        if not self.streamed:
            return [] if self.status == 200 else [self.json["error"]["message"]]
        return [item["error"]["message"] for item in self.items if isinstance(item.get("error"), dict)]


ENDS = (b"response.completed", b"response.incomplete", b"message_stop")


@dataclass(frozen=True)
class Speaker:
    """A client of one dialect."""

    name: str
    path: str
    asks: dict[str, Any] = field(default_factory=dict)

    def body(self, text: str = "Hello", *, stream: bool = False, **more: Any) -> dict[str, Any]:
        asked: dict[str, Any] = {"model": "m", **self.asks}
        if self.name == "completions":
            asked["prompt"] = text
        elif self.name == "responses":
            asked["input"] = text
        else:
            asked["messages"] = [{"role": "user", "content": text}]
        return {**asked, **({"stream": True} if stream else {}), **more}

    def text(self, reply: Any) -> str:
        """What a whole answer says."""
        if self.name == "chat":
            return reply["choices"][0]["message"]["content"] or ""
        if self.name == "completions":
            return reply["choices"][0]["text"]
        if self.name == "responses":
            parts = [part for item in reply["output"] if item["type"] == "message" for part in item["content"]]
            return "".join(part["text"] for part in parts)
        return "".join(block.get("text", "") for block in reply["content"])

    def part(self, item: Any) -> str:
        """What an event of a stream adds."""
        if self.name in ("chat", "completions"):
            choices = item.get("choices") or []
            return "".join(c.get("text") or (c.get("delta") or {}).get("content") or "" for c in choices)
        if self.name == "responses":
            return item["delta"] if item["type"] == "response.output_text.delta" else ""
        return item["delta"].get("text", "") if item["type"] == "content_block_delta" else ""

    async def send(
        self, w: World, body: Any = None, *, token: str = "train", headers: str = "", **more: Any
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await w.raw(self.body(**more) if body is None else body, token, headers, self.path)

    async def ask(self, w: World, body: Any = None, **more: Any) -> Heard:
        reader, writer = await self.send(w, body, **more)
        try:
            return await self.hear(reader)
        finally:
            writer.transport.abort()

    async def hear(self, reader: asyncio.StreamReader) -> Heard:
        async with asyncio.timeout(WAIT):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {n.lower(): v.strip() for n, _, v in (row.partition(":") for row in head[1:] if row)}
            body, whole = b"", True
            try:
                if "content-length" in headers:
                    body = await reader.readexactly(int(headers["content-length"]))
                else:
                    while size := int(await reader.readuntil(b"\r\n"), 16):
                        body += (await reader.readexactly(size + 2))[:-2]
                    await reader.readexactly(2)
            except (asyncio.IncompleteReadError, ConnectionError):
                whole = False
        return Heard(self, int(head[0].split()[1]), headers, body, whole)

    # what the engine says to it

    def stream(self, text: str = "Hi", *, finish: str | None = "stop", usage: bool = True) -> list[bytes]:
        """The events of an engine's stream, [DONE] the last."""
        options = {"stream_options": {"include_usage": usage}}
        return [self.as_asked(event) for event in chunks(text, options, finish)]

    def reply(self, text: str = "Hi", **changes: Any) -> bytes:
        """An engine's whole answer."""
        ids = ids_of(text)
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": ids,
            "routed_experts": None,
        }
        if self.name == "completions":
            logprobs = {"token_logprobs": [-0.25] * len(ids), "tokens": ["x"] * len(ids)}
            choice |= {"text": text, "logprobs": logprobs, "prompt_token_ids": [5, 6, 7]}
        else:
            message = {"role": "assistant", "content": text, "reasoning": None, "tool_calls": []}
            choice |= {"message": message, "logprobs": logprobs_of(ids)}
        usage = {"prompt_tokens": 3, "completion_tokens": len(ids), "total_tokens": 3 + len(ids)}
        top = {"id": "c", "object": "x", "created": 1, "model": "p@3", "usage": usage, "prompt_token_ids": [5, 6, 7]}
        return json.dumps(
            {**top, "choices": [{**choice, **changes}], "kv_transfer_params": None, "metrics": None}
        ).encode()

    def answers(self, text: str = "Hi", *, stream: bool = False, **more: Any) -> Behaviour:
        """An engine that answers, as it was asked."""
        return sse(self.stream(text), **more) if stream else gives(self.reply(text, **more))

    def as_asked(self, event: bytes) -> bytes:
        if self.name != "completions" or event == DONE:
            return event
        data = json.loads(event)
        for choice in data["choices"]:
            choice["text"] = choice.pop("delta").get("content") or ""
            if choice.get("logprobs"):
                told = [entry["logprob"] for entry in choice["logprobs"]["content"]]
                choice["logprobs"] = {"token_logprobs": told, "tokens": ["x"] * len(told)}
        return json.dumps(data).encode()


def gives(content: bytes, *, status: int = 200, cut_at: int | None = None, **headers: str) -> Behaviour:
    """An engine that gives these bytes; cut after so many of them."""

    async def behave(_e: Any, _b: Any, _r: Any, writer: asyncio.StreamWriter) -> None:
        rows = {name.replace("_", "-"): value for name, value in headers.items()}
        if cut_at is None:
            await send_json(writer, status, content, rows)
            return
        await send_json(writer, status, content[:cut_at], {**rows, "content-length": str(len(content))})
        raise ConnectionError

    return behave


SPEAKERS = (
    Speaker("chat", "/v1/chat/completions"),
    Speaker("completions", "/v1/completions", {"max_tokens": 50}),
    Speaker("responses", "/v1/responses"),
    Speaker("messages", "/v1/messages", {"max_tokens": 50}),
)
CHATTING = tuple(speaker for speaker in SPEAKERS if speaker.name != "completions")


def every(speakers: Iterable[Speaker] = SPEAKERS) -> pytest.MarkDecorator:
    """Run a test as a client of each dialect."""
    return pytest.mark.parametrize("speaker", [pytest.param(speaker, id=speaker.name) for speaker in speakers])
