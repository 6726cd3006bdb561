"""What follows a turn that the model sampled: the tokens that close it, the new messages and the generation prompt.

They come from a stand-in conversation, in which a marker stands for the model's words. It is rendered twice, with two
markers that end differently: the longest common suffix of both token sequences is what follows the marker. That it
begins right behind the marker is checked on the decoded text, because a tokenizer may merge across the boundary.
Nothing is searched for or counted in the real words of the model: a turn cut by length, or words that spell a control
token, cannot mislead it.

Four stand-ins are offered, the cheap ones first; the caller takes the first whose tail fits the real conversation:

1. a user turn, an assistant turn whose content is the marker, the new messages;
2. the same, but the assistant turn makes the real turn's tool calls (ids and names), and the marker stands in their
   arguments: for templates that render tool results by looking at the calls (gpt-oss, Gemma 4, Muse);
3. and 4. as 1 and 2, behind the real history: for templates whose rendering depends on what came before (DeepSeek V3).

The tail of 2 and 4 begins at the first end-of-turn or control token behind the marker: what stands between is how the
template ends the arguments, which the model wrote in its own way.

No template is known by name here. Where none of the four fits, there is no exact prompt.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from art_backends.errors import EngineError, TemplateError
from art_backends.proxy import continuation
from art_backends.proxy.control_tokens import break_up

Message = dict[str, Any]
T = TypeVar("T")

REFUSALS = (TemplateError, EngineError)  # what a renderer raises where the template refuses the messages
_MAX_OVERLAP = 8  # end-of-turn tokens that a model samples itself


class Renderer(Protocol):
    """What an engine's /tokenize and /detokenize give. Errors: TemplateError or EngineError."""

    async def tokenize(
        self,
        messages: list[Message],
        tools: list[Message] | None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """The ids that the chat template renders."""
        ...

    async def detokenize(self, ids: list[int]) -> str:
        """The text of the ids, control tokens included."""
        ...


class Cache(Generic[T]):
    """The most recent results by digest of what they were made from."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._items: OrderedDict[bytes, T] = OrderedDict()

    @staticmethod
    def key(*parts: Any) -> bytes:
        return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=16).digest()

    def get(self, key: bytes) -> T | None:
        if key in self._items:
            self._items.move_to_end(key)
        return self._items.get(key)

    def put(self, key: bytes, value: T) -> T:
        self._items[key] = value
        if len(self._items) > self._size:
            self._items.popitem(last=False)
        return value


@dataclass(frozen=True, slots=True)
class Setting:
    """What all renderings of one request share."""

    tools: list[Message] | None
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The engine's tokens that matter here; both may be empty where an engine does not tell."""

    eos_ids: frozenset[int]
    special_tokens: tuple[str, ...]

    @classmethod
    def of(cls, info: Mapping[str, Any] | None) -> Vocabulary:
        """From the engine's /tokenizer_info; None where it does not tell."""
        told = info or {}
        return cls(frozenset(told.get("eos_token_ids") or ()), tuple(told.get("special_tokens") or ()))

    def is_control(self, token: int, text: str) -> bool:
        return token in self.eos_ids or text in self.special_tokens or _spells_control_token(text, self.special_tokens)


def _spells_control_token(text: str, special_tokens: tuple[str, ...]) -> bool:
    return not special_tokens and break_up(text)[1] == 1 and not any(c.isspace() for c in text)


def common_suffix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common suffix."""
    length = 0
    for a, b in zip(reversed(first), reversed(second), strict=False):
        if a != b:
            break
        length += 1
    return length


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    length = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        length += 1
    return length


def markers(avoid: str) -> tuple[str, str]:
    """Two markers that end in different letters and stand nowhere in ``avoid``."""
    base = "Q7standin"
    while base in avoid:
        base += "Q7"
    return base + "Ka", base + "Zo"


@dataclass(frozen=True, slots=True)
class StandIn:
    """A conversation in which a marker stands for the model's words: in the content, or in every one of ``calls``."""

    before: tuple[Message, ...]
    calls: tuple[Any, ...] = ()
    real: bool = False  # behind the real history: too many to be remembered

    def messages(self, marker: str, new: Sequence[Message] = ()) -> list[Message]:
        turn: Message = {"role": "assistant", "content": "" if self.calls else marker}
        if self.calls:
            turn["tool_calls"] = [
                {
                    "id": call.get("id"),
                    "type": "function",
                    "function": {
                        "name": continuation.call_name(call),
                        "arguments": json.dumps({"marker": marker}),
                    },
                }
                for call in self.calls
            ]
        return [*self.before, turn, *new]


_USER: Message = {"role": "user", "content": "Hello"}


def _probes(new: Sequence[Message]) -> tuple[list[Message], list[str]]:
    """The new messages with a probe for every content that is not empty, and the probes."""
    probed, probes = [], []
    for i, message in enumerate(new):
        if continuation.content_text(message.get("content")):
            probes.append(f"Q7probe{i}end")
            message = {**message, "content": probes[-1]}  # noqa: PLW2901
        probed.append(message)
    return probed, probes


class Tails:
    """Finds tails with one engine's renderer; remembers those that depend on no history."""

    def __init__(self, renderer: Renderer, vocabulary: Vocabulary) -> None:
        self.renderer = renderer
        self.vocabulary = vocabulary
        self._tails: Cache[list[int] | TemplateError] = Cache(1024)
        self._texts: Cache[str] = Cache(4096)
        self._shown: Cache[bool] = Cache(256)

    async def decode(self, ids: Sequence[int]) -> str:
        """Text of a short piece, remembered."""
        key = self._texts.key(list(ids))
        text = self._texts.get(key)
        return text if text is not None else self._texts.put(key, await self.renderer.detokenize(list(ids)))

    async def render(self, messages: Sequence[Message], setting: Setting, generate: bool = True) -> list[int]:
        return await self.renderer.tokenize(
            list(messages), setting.tools, add_generation_prompt=generate, chat_template_kwargs=setting.kwargs or None
        )

    async def generation_prompt(self, setting: Setting) -> str:
        """What the template appends after a user message to make the model speak; "" if that cannot be told."""
        key = self._texts.key("generation prompt", setting.tools, setting.kwargs)
        text = self._texts.get(key)
        if text is not None:
            return text
        user = [{"role": "user", "content": "Hello"}]
        try:
            full, bare = await self.render(user, setting), await self.render(user, setting, generate=False)
        except REFUSALS:
            return self._texts.put(key, "")
        full_text, bare_text = await self.decode(full), await self.decode(bare)
        return self._texts.put(key, full_text.removeprefix(bare_text) if full_text.startswith(bare_text) else "")

    async def after(
        self, stand_in: StandIn, new: Sequence[Message], setting: Setting, *, generate: bool = True
    ) -> list[int]:
        """The ids that follow the marker in the stand-in. TemplateError if they cannot be told."""
        key = self._tails.key(stand_in.messages("", new), setting.tools, setting.kwargs, generate)
        found = None if stand_in.real else self._tails.get(key)
        if found is None:
            try:
                found = await self._after(stand_in, new, setting, generate)
            except TemplateError as error:
                found = error
            if not stand_in.real:
                self._tails.put(key, found)
        if isinstance(found, TemplateError):
            raise TemplateError(str(found))
        return found

    async def _after(self, stand_in: StandIn, new: Sequence[Message], setting: Setting, generate: bool) -> list[int]:
        first, second = markers(json.dumps([stand_in.messages("", new), setting.tools], default=str))
        one, two = await asyncio.gather(
            self.render(stand_in.messages(first, new), setting, generate),
            self.render(stand_in.messages(second, new), setting, generate),
        )
        start = len(one) - common_suffix(one, two)
        if not (await self.renderer.detokenize(one[:start])).endswith(first):
            raise TemplateError("the template changes or hides the stand-in's words, or merges them with what follows")
        return one[start:]

    async def _shows_all(self, stand_in: StandIn, new: Sequence[Message], setting: Setting) -> bool:
        """Whether the template renders each new message behind the marker: some pass over a tool result that answers
        no tool call. Depends on the messages' kinds only, so it is asked once per kind."""
        probed, probes = _probes(new)
        messages = stand_in.messages(markers(json.dumps(probed, default=str))[0], probed)
        kinds = [
            [m.get("role"), sorted(m), [continuation.call_name(c) for c in continuation.tool_calls(m)]]
            for m in messages
        ]
        key = self._shown.key(kinds, setting.tools, setting.kwargs)
        shown = self._shown.get(key)
        if shown is None:
            text = await self.renderer.detokenize(await self.render(messages, setting))
            position = 0
            for probe in probes:
                position = text.find(probe, position) + 1
                if not position:
                    break
            shown = self._shown.put(key, position > 0 or not probes)
        return shown

    async def candidates(
        self,
        turn: Message,
        history: Sequence[Message],
        new: Sequence[Message],
        setting: Setting,
        sampled: Sequence[int],
    ) -> AsyncIterator[list[int]]:
        """The tails that the four stand-ins give, without what the model sampled itself; refusals are left out.

        ``turn`` is the assistant message as the client sent it, ``history`` what stands before it, ``new`` what comes
        after it, ``sampled`` the ids that the model sampled in that turn.
        """
        calls = tuple(continuation.tool_calls(turn))
        stand_ins = [StandIn((_USER,)), StandIn((_USER,), calls)] if calls else [StandIn((_USER,))]
        for stand_in in stand_ins + [replace(s, before=tuple(history), real=True) for s in stand_ins if history]:
            try:
                tail = await self._tail(stand_in, new, setting, sampled)
                shown = await self._shows_all(stand_in, new, setting)
            except REFUSALS:
                continue
            if shown:
                yield await self._join(sampled, tail, setting)

    async def _tail(
        self, stand_in: StandIn, new: Sequence[Message], setting: Setting, sampled: Sequence[int]
    ) -> list[int]:
        """What follows the turn's words; behind tool calls, what follows their arguments."""
        tail = await self.after(stand_in, new, setting)
        if not stand_in.calls:
            return tail
        bare = await self.after(stand_in, (), setting, generate=False)
        closing = tail[: common_prefix(tail, bare)]  # how the template ends the arguments and the turn
        if sampled and sampled[-1] in self.vocabulary.eos_ids and sampled[-1] in closing:
            return tail[closing.index(sampled[-1]) :]
        ends = [i for i, token in enumerate(closing) if token in self.vocabulary.eos_ids] or [
            i for i, token in enumerate(closing) if self.vocabulary.is_control(token, await self.decode([token]))
        ]
        if not ends:
            raise TemplateError("nothing tells where the tool call's arguments end")
        return tail[ends[0] :]

    async def _join(self, sampled: Sequence[int], tail: list[int], setting: Setting) -> list[int]:
        """The tail without the part of the turn's closing that the model sampled itself."""
        if not sampled or not tail:
            return tail
        closing = await self._past_space(tail)
        if not self.vocabulary.is_control(closing[0], await self.decode([closing[0]])):
            return tail  # the turn is closed by ordinary text, which no model samples as its end
        for length in range(min(_MAX_OVERLAP, len(sampled), len(closing)), 0, -1):
            if list(sampled[-length:]) == closing[:length]:
                return closing[length:]
        # The model may end its turn with another end-of-turn token than the template's: the turn is closed by one.
        if sampled[-1] in self.vocabulary.eos_ids and closing[0] in await self._closers(setting):
            return closing[1:]
        return tail

    async def _past_space(self, tail: list[int]) -> list[int]:
        """The tail without the white space that some templates write before the end-of-turn token."""
        skip = 0
        while skip < min(_MAX_OVERLAP, len(tail) - 1) and (await self.decode([tail[skip]])).isspace():
            skip += 1
        return tail[skip:]

    async def _closers(self, setting: Setting) -> set[int]:
        """The tokens with which the template closes a turn; none where the next turn's opening does that (GLM)."""
        stand_in = StandIn((_USER,))
        try:
            bare = await self._past_space(await self.after(stand_in, (), setting, generate=False))
            more = await self._past_space(await self.after(stand_in, (_USER,), setting))
        except REFUSALS:
            return set()
        return {bare[0], *more[:1]} if bare else set()
