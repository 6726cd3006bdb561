"""Whether an earlier answer's reasoning may stay in a prompt is seen by what the engine calls the next one's tokens."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from art_backends.errors import EngineError
from art_backends.proxy.engine import Engine
from art_backends.proxy.sse import Event
from art_backends.server import probe_reasoning

from tests.backends.proxy.conftest import CHATML, TemplateEngine

TAGS = ("<think>", "</think>")


class Server:
    """A ChatML model that draws among the allowed tokens, and a reasoning parser of one of the kinds that there are.

    ``parser``: "none"; "last turn" looks for the end marker behind the last turn's beginning; "anywhere" in the prompt.
    """

    def __init__(self, parser: str, *, tags: bool = True, exact: bool = True) -> None:
        self.model = TemplateEngine(CHATML + "".join(f"{{# {tag} #}}" for tag in TAGS))
        if tags:
            self.model.tokenizer.add_special_tokens(list(TAGS))
        self.parser = parser
        self.exact = exact
        self.asked = 0

    async def tokenize(self, body: dict[str, Any]) -> dict[str, Any] | None:
        if "prompt" in body:
            return {"tokens": self.model.encode(body["prompt"])}
        text = self.model.render(body["messages"], None, body.get("add_generation_prompt", True))
        return {"tokens": self.model.encode(text)}

    async def detokenize(self, tokens: list[int]) -> str | None:
        return self.model.decode(tokens)

    async def chat(self, body: dict[str, Any]) -> tuple[int, list[Any], Any]:
        if not self.exact:
            return 400, [], {"error": {"message": "unknown field"}}
        choices = [
            {"index": index, "message": self._said(body, ids), "token_ids": ids} for index, ids in self._drawn(body)
        ]
        return 200, [], {"choices": choices}

    @asynccontextmanager
    async def open(self, path: str, content: bytes) -> AsyncIterator[Any]:
        yield Stream(self, json.loads(content))

    def _drawn(self, body: dict[str, Any]) -> list[tuple[int, list[int]]]:
        self.asked += 1
        draw = random.Random(body["seed"])
        return [
            (index, [draw.choice(body["allowed_token_ids"]) for _ in range(body["max_tokens"])])
            for index in range(body.get("n", 1))
        ]

    def _said(self, body: dict[str, Any], ids: list[int]) -> dict[str, Any]:
        """A whole answer is parsed without a look at the prompt, as vLLM does it."""
        text = self.model.decode(ids)
        if self.parser == "none":
            return {"content": text}
        return {"reasoning": text.replace("<think>", ""), "content": None}

    def chunks(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        prompt = self.model.decode(body["kv_transfer_params"]["prompt_token_ids"])
        where = prompt.rpartition("<|im_start|>")[2] if self.parser == "last turn" else prompt
        words = self.parser == "none" or "</think>" in where
        found = []
        for index, ids in self._drawn(body):
            for token in ids:
                text = self.model.decode([token])
                delta = {"content": text} if words else {"reasoning": text.replace("<think>", "")}
                found.append({"choices": [{"index": index, "delta": delta, "token_ids": [token]}]})
        return found


class Stream:
    def __init__(self, server: Server, body: dict[str, Any]) -> None:
        self.status = 200 if server.exact else 400
        self._events = [Event(json.dumps(chunk).encode()) for chunk in server.chunks(body)] if server.exact else []
        self._events.append(Event(b"[DONE]"))

    async def read(self) -> bytes:
        return b"unknown field"

    async def next_events(self, idle_seconds: float | None = None) -> list[Event] | None:
        events, self._events = self._events, []
        return events or None


def kept(server: Any) -> bool:
    return asyncio.run(probe_reasoning.may_be_kept(cast(Engine, server), "base"))


@pytest.mark.parametrize(("parser", "may"), [("none", True), ("last turn", True), ("anywhere", False)])
def test_by_what_the_parser_does(parser: str, may: bool, caplog: pytest.LogCaptureFixture) -> None:
    server = Server(parser)
    assert kept(server) is may
    assert server.asked > 0
    assert ("</think>" in caplog.text) is not may


def test_a_model_without_such_tokens_is_not_asked() -> None:
    server = Server("anywhere", tags=False)
    assert kept(server)
    assert server.asked == 0


def test_of_an_engine_that_refuses_the_question_nothing_is_believed() -> None:
    assert not kept(Server("none", exact=False))


def test_an_engine_that_fails_is_said() -> None:
    class Broken(Server):
        async def tokenize(self, body: dict[str, Any]) -> dict[str, Any] | None:
            raise EngineError("the engine broke off", 502, "engine_interrupted")

    with pytest.raises(EngineError, match="broke off"):
        kept(Broken("none"))
