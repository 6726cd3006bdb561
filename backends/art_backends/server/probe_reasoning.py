"""Asks the engine whether an earlier answer's reasoning may stand in a prompt as it was sampled.

An engine that separates reasoning from words has to know whether the answer begins inside the reasoning, and some look
for the end marker anywhere in the prompt: with an old one in it, new reasoning is passed on as words. So the same few
tokens are drawn behind two prompts, one with an old reasoning and one without, and it is compared what the engine calls
them. The words are random ones out of two tokens, the start marker and a word, so that each prompt has many of the
same answers.

It refuses to know a parser by name. Where the answers cannot be compared, reasoning is not kept: that costs the exact
prompt of such turns and misreads nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import orjson

from art_backends.errors import EngineError, TemplateError
from art_backends.proxy import sse
from art_backends.proxy.app import EngineRenderer
from art_backends.proxy.engine import Engine
from art_backends.proxy.engine_client import CHAT, parse_json
from art_backends.proxy.tail import Setting, StandIn, Tails, Vocabulary
from art_backends.server.probe import PROBE_SECONDS

log = logging.getLogger(__name__)

# Where reasoning begins and ends, in the words of the known model families.
MARKERS = (
    ("<think>", "</think>"),
    ("<|channel>thought", "<channel|>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
_USER: dict[str, Any] = {"role": "user", "content": "Hello"}
_ANSWERS, _TOKENS = 16, 3
_EVEN = 100.0  # a temperature at which both tokens are about as likely

Seen = dict[tuple[int, ...], tuple[str, str]]  # by the tokens so far: what they were called (reasoning, content)


async def may_be_kept(engine: Engine, model: str) -> bool:
    """False if the engine misreads an answer behind a prompt that has an earlier answer's reasoning in it.

    EngineError if the engine is away.
    """
    for start, end in MARKERS:
        opening, closing = await _ids(engine, start), await _ids(engine, end)
        if closing is None or opening is None or len(closing) != 1:
            continue  # no token of this model
        if not await _read_alike(engine, model, start, end, opening):
            log.warning(
                "the engine takes the end of an earlier answer's reasoning (%s) for that of the new one: answers with "
                "reasoning are rendered anew in later prompts, each such turn is a sequence of its own",
                end,
            )
            return False
    return True


async def _ids(engine: Engine, text: str) -> list[int] | None:
    """The tokens of a text; None if the engine does not say."""
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            reply = await engine.tokenize({"prompt": text, "add_special_tokens": False})
    except EngineError as error:
        if error.status >= 500:
            raise
        return None
    return None if reply is None else list(reply["tokens"])


async def _read_alike(engine: Engine, model: str, start: str, end: str, opening: list[int]) -> bool:
    prompts = await _prompts(engine, start, end)
    word = await _ids(engine, "a")
    if prompts is None or not word:
        return True  # without exact prompts nothing is kept anyway
    allowed = [opening[0], word[0]]
    for stream in (True, False):
        plain, kept = [await _seen(engine, model, prompt, allowed, stream=stream) for prompt in prompts]
        if plain is None or kept is None:
            return True  # it takes no such request: no vLLM, and none that separates reasoning
        both = plain.keys() & kept.keys()
        if not any(tokens[:1] == (opening[0],) for tokens in both) or any(plain[t] != kept[t] for t in both):
            return False
    return True


async def _prompts(engine: Engine, start: str, end: str) -> tuple[list[int], list[int]] | None:
    """Token ids of two conversations before the model's second turn: its first one without, and with, reasoning."""
    renderer = EngineRenderer(engine)
    tails = Tails(renderer, Vocabulary(frozenset(), ()))
    setting = Setting(None, {})
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            asked = await tails.render([_USER], setting)
            tail = await tails.after(StandIn((_USER,)), [_USER], setting)
            open_already = (await renderer.detokenize(asked)).rstrip().endswith(start)
    except (TemplateError, EngineError) as error:
        if isinstance(error, EngineError) and error.status >= 500 and error.status != 501:
            raise
        return None
    plain, thought = (
        await _ids(engine, "Hello"),
        await _ids(engine, f"{'' if open_already else start}\nSo.\n{end}\n\nHello"),
    )
    if plain is None or thought is None:
        return None
    return [*asked, *plain, *tail], [*asked, *thought, *tail]


async def _seen(engine: Engine, model: str, prompt: list[int], allowed: list[int], *, stream: bool) -> Seen | None:
    """What the engine calls the tokens of some random answers; None if it takes no such request."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [_USER],
        "n": _ANSWERS,
        "max_tokens": _TOKENS,
        "temperature": _EVEN,
        "top_p": 1.0,
        "top_k": 0,
        "seed": 7,
        "allowed_token_ids": allowed,
        "return_token_ids": True,
        "kv_transfer_params": {"prompt_token_ids": prompt},
        "stream": stream,
    }
    tokens: dict[int, list[int]] = {}
    said: dict[int, tuple[str, str]] = {}
    seen: Seen = {}
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            async for data in _replies(engine, body):
                for choice in data.get("choices") or ():
                    index, part = choice["index"], choice.get("delta") or choice.get("message") or {}
                    reasoning, content = said.get(index, ("", ""))
                    said[index] = (reasoning + (part.get("reasoning") or ""), content + (part.get("content") or ""))
                    tokens.setdefault(index, []).extend(choice.get("token_ids") or ())
                    seen[tuple(tokens[index])] = said[index]
    except EngineError as error:
        if error.status >= 500:
            raise
        return None
    except TimeoutError:
        raise EngineError(f"the engine gave no answer within {PROBE_SECONDS:.0f} s", 504, "engine_timeout") from None
    return seen


async def _replies(engine: Engine, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The whole reply, or every chunk. EngineError if it is refused."""
    if not body["stream"]:
        status, _, reply = await engine.chat(body)
        if status != 200:
            raise EngineError(f"the engine refused a probe: {orjson.dumps(reply)[:300]!r}", status, "refused")
        yield reply
        return
    async with engine.open(CHAT, orjson.dumps(body)) as reply:
        if reply.status != 200:
            raise EngineError(f"the engine refused a probe: {(await reply.read())[:300]!r}", reply.status, "refused")
        while (events := await reply.next_events(PROBE_SECONDS)) is not None:
            for event in events:
                if event.data is not None and event.data != sse.DONE:
                    yield parse_json(event.data)
