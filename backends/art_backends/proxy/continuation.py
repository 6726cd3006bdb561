"""Which earlier call of its rollout a request continues.

A request continues a call if its messages begin with that call's messages, then one of its answers as the client
re-serialised it, then at least one new message; tools and everything else that the chat template sees are the same.
Messages are compared by meaning: an absent, null or empty content is the same, parts of text are joined, keys have no
order, tool-call arguments are compared parsed, tool-call ids by their place in the conversation (a client may make up
new ones each time), and an assistant message may gain or lose ``refusal``, ``annotations``, ``reasoning_content``, ….

Messages are hashed in a chain, so that one pass over the request finds all calls it could continue; what a request
shares with a recent one of the rollout is not even hashed again. No tokens are looked at here, and nothing is guessed:
what does not match is no continuation.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from art_backends.trajectories import Call, CallStatus, Choice

Message = Mapping[str, Any]

_RECENT = 8  # requests of a rollout whose digests are kept at hand: as many branches as usually run side by side
# What a chat template sees beside messages and tools, as vLLM passes it on.
_TEMPLATE_FIELDS = ("documents",)
# Kinds of content parts that are text, and where it stands.
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def _canonical(value: Any) -> Any:
    """The value with 1.0 written as 1: clients in JavaScript do not tell them apart."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {str(k): _canonical(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(v) for v in value]
    return value


def _digest(*parts: Any) -> bytes:
    try:
        text = orjson.dumps(parts, default=str, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    except TypeError:  # lone surrogates, long integers
        text = json.dumps(parts, sort_keys=True, default=str).encode()
    return hashlib.blake2b(text, digest_size=16).digest()


def content_text(content: Any) -> str | None:
    """A message's content as one string; None if it holds more than text (media)."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    texts = []
    for part in content:
        text = part
        if isinstance(part, Mapping):
            text = part.get(_TEXT_PARTS.get(str(part.get("type", "text")), ""))
        if not isinstance(text, str):
            return None
        texts.append(text)
    return "".join(texts)


def parsed_arguments(arguments: Any) -> tuple[bool, Any]:
    """(whether they parse, the parsed arguments or the raw text). No arguments at all are the empty object."""
    if not isinstance(arguments, str):
        return True, _canonical(arguments if arguments is not None else {})
    if not arguments.strip():
        return True, {}
    try:
        return True, _canonical(json.loads(arguments))
    except (ValueError, RecursionError):
        return False, arguments


def tool_calls(message: Message) -> list[Mapping[str, Any]]:
    """The message's tool calls, a legacy ``function_call`` included; entries that are no objects are left out."""
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        return [call for call in calls if isinstance(call, Mapping)]
    legacy = message.get("function_call")
    return [{"function": legacy}] if isinstance(legacy, Mapping) else []


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    return function if isinstance(function, Mapping) else call


def call_name(call: Mapping[str, Any]) -> str:
    """The name of the tool that is called."""
    return str(_function(call).get("name"))


@dataclass(frozen=True, slots=True)
class Answer:
    """An assistant message reduced to what is compared. ``ids`` is None where a tool call has no id."""

    content: str
    calls: tuple[tuple[str, bool, str], ...]  # name, whether the arguments parse, arguments as canonical JSON
    ids: tuple[str, ...] | None

    @classmethod
    def of(cls, message: Message) -> Answer:
        text = content_text(message.get("content"))
        calls, ids = [], []
        for call in tool_calls(message):
            parses, arguments = parsed_arguments(_function(call).get("arguments"))
            calls.append((call_name(call), parses, json.dumps(arguments, sort_keys=True, default=str)))
            ids.append(call.get("id"))
        content = repr(message.get("content")) if text is None else text.strip()
        return cls(content, tuple(calls), tuple(map(str, ids)) if all(ids) else None)

    @property
    def key(self) -> bytes:
        return _digest(self.content, self.calls)

    def same_ids(self, sent: Answer) -> bool:
        """Whether tool-call ids show that ``sent`` is this answer."""
        return bool(self.calls) and self.ids is not None and self.ids == sent.ids

    def matches(self, sent: Answer) -> bool:
        """Whether ``sent`` (from a client's history) is this answer (as it was given to the client).

        With the same tool-call ids a client may have dropped the content beside the calls, and may have replaced
        arguments that were no JSON. Arguments that parse and differ are an edit, whatever the ids say.
        """
        if self.content == sent.content and self.calls == sent.calls:
            return True
        if not self.same_ids(sent) or (sent.content and sent.content != self.content):
            return False
        return all(
            mine == theirs or (mine[0] == theirs[0] and not mine[1])
            for mine, theirs in zip(self.calls, sent.calls, strict=True)
        )


class _Ids:
    """Tool-call ids by their order of appearance in one conversation."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    def place(self, call_id: Any) -> Any:
        return self._places.get(str(call_id), str(call_id)) if call_id is not None else None

    def learn(self, message: Message) -> None:
        for call in tool_calls(message) if message.get("role") == "assistant" else ():
            if call.get("id") is not None:
                self._places[str(call["id"])] = len(self._places)


def _message_parts(message: Message, answer: Answer | None, ids: _Ids) -> list[Any]:
    role = str(message.get("role"))
    if answer is not None:
        ids.learn(message)
        return [role, answer.content, answer.calls]
    text = content_text(message.get("content"))
    content = _canonical(message.get("content")) if text is None else text
    if role == "tool":  # clients add and drop its name; where a template shows it, the check of the prompt sees it
        return [role, content, ids.place(message.get("tool_call_id"))]
    return [role, content, message.get("name")]


def effort_kwargs(request: Mapping[str, Any]) -> dict[str, Any]:
    """``chat_template_kwargs`` with what ``reasoning_effort`` says to a template; vLLM adds the same in a chat request,
    and not when it is asked for the tokens of one."""
    kwargs = dict(request.get("chat_template_kwargs") or {})
    effort = request.get("reasoning_effort")
    if effort is not None:
        kwargs.setdefault("reasoning_effort", effort)
        kwargs.setdefault("enable_thinking", effort != "none")
    return kwargs


def template_kwargs(request: Mapping[str, Any]) -> dict[str, Any]:
    """What the engine hands to the chat template beside messages and tools."""
    kwargs = effort_kwargs(request)
    for name in _TEMPLATE_FIELDS:
        if request.get(name) is not None:
            kwargs.setdefault(name, request[name])
    return kwargs


class Link(NamedTuple):
    """A request's beginning, up to and with one message (or none yet)."""

    key: bytes  # digest by meaning: the template's settings, the tools and the messages so far
    raw: bytes  # the same with the literal tool-call ids
    answer: bytes | None = None  # Answer.key of the message, if it is the assistant's


@dataclass(frozen=True, slots=True)
class Chain:
    """The links of a request: one before its first message, then one for each message."""

    messages: Sequence[Message]
    links: list[Link]

    @classmethod
    def of(cls, request: Mapping[str, Any], known: Iterable[Chain] = ()) -> Chain:
        """The links of a request; those of the beginning that it shares with a ``known`` one are taken over."""
        messages = list(request.get("messages") or [])
        base = _digest(_canonical(request.get("tools") or None), template_kwargs(request), request.get("chat_template"))
        links = [Link(base, base)]
        for other in known:
            if other.links[0].key == base:
                shared = other._shared(messages)
                if shared >= len(links):
                    links = other.links[: shared + 1]
        ids = _Ids()
        for message in messages[: len(links) - 1]:
            ids.learn(message)
        for message in messages[len(links) - 1 :]:
            answer = Answer.of(message) if message.get("role") == "assistant" else None
            parts = _message_parts(message, answer, ids)
            raw = [[call.get("id") for call in tool_calls(message)], message.get("tool_call_id")]
            key = _digest(links[-1].key.hex(), parts)
            links.append(Link(key, _digest(links[-1].raw.hex(), parts, raw), answer.key if answer else None))
        return cls(messages, links)

    def _shared(self, messages: Sequence[Message]) -> int:
        shared = 0
        for mine, theirs in zip(self.messages, messages, strict=False):
            if mine != theirs:
                break
            shared += 1
        return shared


@dataclass(frozen=True, slots=True)
class Match:
    """The call that a request continues. ``position`` is where its answer stands in the request's messages."""

    call: Call
    choice: Choice
    position: int


@dataclass(slots=True)
class _Entry:
    call: Call
    raw: bytes
    answers: list[tuple[Choice, Answer]]


@dataclass(slots=True)
class RolloutIndex:
    """A rollout's completed calls, ready to be continued. Hold one per open rollout and ``add`` each finished call.

    Calls without exact ids (not OK, no prompt ids, an answer without ids) are kept out: they cannot be continued.
    ``texts`` remembers decoded pieces of calls by call id, so that a long rollout decodes each piece once.
    """

    texts: dict[str, str] = field(default_factory=dict)
    _entries: dict[bytes, list[_Entry]] = field(default_factory=dict)
    _calls: dict[str, Call] = field(default_factory=dict)
    _own: set[bytes] = field(default_factory=set)
    _recent: deque[Chain] = field(default_factory=lambda: deque(maxlen=_RECENT))

    @classmethod
    def of(cls, calls: Sequence[Call]) -> RolloutIndex:
        index = cls()
        for call in calls:
            index.add(call)
        return index

    def add(self, call: Call) -> None:
        """Take up a finished call (again: no effect)."""
        if call.status is not CallStatus.OK or call.id in self._calls:
            return
        answers = [(choice, Answer.of(choice.message)) for choice in call.choices]
        self._own.update(answer.key for _, answer in answers)
        answers = [(choice, answer) for choice, answer in answers if choice.token_ids]
        if not call.prompt_token_ids or not answers:
            return
        self._calls[call.id] = call
        last = self._chain(call.request).links[-1]
        self._entries.setdefault(last.key, []).append(_Entry(call, last.raw, answers))

    def call(self, call_id: str | None) -> Call | None:
        return self._calls.get(call_id) if call_id is not None else None

    def _chain(self, request: Mapping[str, Any]) -> Chain:
        chain = Chain.of(request, self._recent)
        if not self._recent or self._recent[-1].links[-1] != chain.links[-1]:
            self._recent.append(chain)
        return chain

    def own(self, request: Mapping[str, Any]) -> frozenset[int]:
        """Positions of the request's assistant messages that this rollout's model sampled."""
        if not self._own:
            return frozenset()
        return frozenset(i for i, link in enumerate(self._chain(request).links[1:]) if link.answer in self._own)

    def match(self, request: Mapping[str, Any]) -> Match | None:
        """The longest earlier call that the request continues, or None. Among equals: the one whose tool-call ids
        are the request's, then the latest."""
        if not self._entries:
            return None
        chain = self._chain(request)
        messages, links = chain.messages, chain.links
        for position in range(len(messages) - 2, -1, -1):
            if messages[position].get("role") != "assistant" or links[position].key not in self._entries:
                continue
            sent = Answer.of(messages[position])
            found = [
                ((answer.same_ids(sent), entry.raw == links[position].raw, order), entry.call, choice)
                for order, entry in enumerate(self._entries[links[position].key])
                for choice, answer in entry.answers
                if answer.matches(sent)
            ]
            if found:
                _, call, choice = max(found, key=lambda item: item[0])
                return Match(call, choice, position)
        return None
