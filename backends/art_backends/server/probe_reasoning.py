"""Asks the engine whether an earlier answer's reasoning may stand in a prompt as it was sampled.

An engine that separates reasoning from words has to know whether the answer begins inside the reasoning, and some look
for the end marker anywhere in the prompt: with an old one in it, new reasoning is passed on as words. So the same few
tokens are drawn behind two prompts, one with an old reasoning and one without, and it is compared what the engine calls
them. The words are random ones out of a few tokens, the start marker and letters, so that each prompt has answers of
the same kinds.

It refuses to know a parser by name. Where the answers cannot be compared, reasoning is not kept: that costs the exact
prompt of such turns and misreads nothing.
"""

from __future__ import annotations

import asyncio
import logging
import math
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
_LETTERS = "abcdefgh"
_ANSWERS, _TOKENS = 16, 3
_BIAS = 100.0  # the most that vLLM takes

# By the kinds of tokens so far (s: the start marker, w: a word): was there reasoning, were there words?
Seen = dict[str, set[tuple[bool, bool]]]


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
    words = [ids[0] for ids in [await _ids(engine, letter) for letter in _LETTERS] if ids is not None and len(ids) == 1]
    if prompts is None or not words:
        return True  # without exact prompts nothing is kept anyway
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            for stream in (True, False):
                plain, kept = [await _seen(engine, model, ids, opening[0], words, stream=stream) for ids in prompts]
                both = plain.keys() & kept.keys()
                if not any(kind.startswith("s") for kind in both) or any(plain[kind] != kept[kind] for kind in both):
                    return False
    except TimeoutError:
        raise EngineError(f"the engine gave no answer within {PROBE_SECONDS:.0f} s", 504, "engine_timeout") from None
    except EngineError as error:
        if error.status >= 500:
            raise
        log.info("the engine refuses to be asked about reasoning: %s", error)
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


async def _seen(engine: Engine, model: str, prompt: list[int], start: int, words: list[int], *, stream: bool) -> Seen:
    """What the engine calls the tokens of some random answers. EngineError if it is away or takes no such request."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [_USER],
        "max_tokens": _TOKENS,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "seed": 7,
        "allowed_token_ids": [start, *words],
        "return_token_ids": True,
        "kv_transfer_params": {"prompt_token_ids": prompt},
    }
    body["logit_bias"] = {str(start): await _evening(engine, body, start)}
    tokens: dict[int, str] = {}
    said: dict[int, tuple[bool, bool]] = {}
    seen: Seen = {}
    async for data in _replies(engine, {**body, "n": _ANSWERS, "stream": stream}):
        for choice in data.get("choices") or ():
            index, part = choice["index"], choice.get("delta") or choice.get("message") or {}
            before = said.get(index, (False, False))
            said[index] = (before[0] or bool(part.get("reasoning")), before[1] or bool(part.get("content")))
            kinds = ("s" if token == start else "w" for token in choice.get("token_ids") or ())
            tokens[index] = tokens.get(index, "") + "".join(kinds)
            seen.setdefault(tokens[index], set()).add(said[index])
    return seen


async def _evening(engine: Engine, body: dict[str, Any], start: int) -> float:
    """The bias that makes the start marker about as likely, at first, as all of the words together."""
    asked = {**body, "max_tokens": 1, "logprobs": True, "top_logprobs": 20, "return_tokens_as_token_ids": True}
    reply = await _whole(engine, asked)
    try:
        (place,) = reply["choices"][0]["logprobs"]["content"]
        told = {str(entry["token"]): float(entry["logprob"]) for entry in place["top_logprobs"]}
    except (KeyError, IndexError, TypeError, ValueError):
        return 0.0
    likely = min(max(told.get(f"token_id:{start}", -_BIAS), -_BIAS), -1e-6)
    return max(-_BIAS, min(_BIAS, math.log(-math.expm1(likely)) - likely))


async def _whole(engine: Engine, body: dict[str, Any]) -> Any:
    """The reply to what is no stream. EngineError if it is refused."""
    status, _, reply = await engine.chat(body)
    if status != 200:
        raise EngineError(f"the engine refused a probe: {orjson.dumps(reply)[:300]!r}", status, "refused")
    return reply


async def _replies(engine: Engine, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The whole reply, or every chunk. EngineError if it is refused."""
    if not body["stream"]:
        yield await _whole(engine, body)
        return
    async with engine.open(CHAT, orjson.dumps(body)) as reply:
        if reply.status != 200:
            raise EngineError(f"the engine refused a probe: {(await reply.read())[:300]!r}", reply.status, "refused")
        while (events := await reply.next_events(PROBE_SECONDS)) is not None:
            for event in events:
                if event.data is not None and event.data != sse.DONE:
                    yield parse_json(event.data)
