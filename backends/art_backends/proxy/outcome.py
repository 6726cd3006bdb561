"""Puts a call's outcome together from the engine's reply: whole, or chunk by chunk of a stream.

Messages are re-assembled as a client would do it (tool calls by index, in parallel, with or without ids); token ids
and logprobs are taken as they are. What the reply really carried decides the capture level.

It refuses to guess: ids without as many finite logprobs are "ids", a choice without ids makes the call "text".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from art_backends.trajectories import CaptureLevel, Choice

BROKEN = frozenset({"abort", "error"})  # an engine's word for an answer that it gave up: not the policy's doing
UNFINISHED = BROKEN | {None}
GIVEN_UP = "the engine did not end its answer"
_CHOICE = Choice()  # to be copied, which takes a tenth of the time that a new one takes
_JOINED = ("content", "reasoning", "reasoning_content", "refusal")


@dataclass(frozen=True)
class Outcome:
    """What a call came to. ``complete``: every choice that was asked for is there and says why it ended."""

    prompt_token_ids: list[int]
    choices: list[Choice]
    capture: CaptureLevel
    complete: bool


@dataclass
class _Choice:
    message: dict[str, Any] = field(default_factory=lambda: {"role": "assistant", "content": None})
    tool_calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    finish_reason: str | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    has_ids: bool = False
    has_logprobs: bool = True


class Assembler:
    """Feed it one whole reply, or every chunk of a stream in order; then take the ``outcome``."""

    def __init__(self, n: int = 1) -> None:
        self._n = n
        self._choices: dict[int, _Choice] = {}
        self._prompt: list[int] | None = None
        self._prompts_differ = False
        self._completion_tokens: int | None = None

    def add(self, data: Mapping[str, Any]) -> None:
        """One reply or chunk, as the engine sent it."""
        self._prompt_ids(data.get("prompt_token_ids"))
        usage = data.get("usage")
        if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
            self._completion_tokens = usage["completion_tokens"]
        for item in data.get("choices") or ():
            self._prompt_ids(item.get("prompt_token_ids"))
            choice = self._choices.setdefault(item.get("index") or 0, _Choice())
            _tokens(choice, item)
            if item.get("finish_reason") is not None:
                choice.finish_reason = item["finish_reason"]
            if "delta" in item:
                _delta(choice, item["delta"] or {})
            elif "message" in item:
                choice.message = _whole(item["message"] or {})
            elif item.get("text"):
                choice.message["content"] = (choice.message["content"] or "") + item["text"]

    def _prompt_ids(self, ids: Any) -> None:
        if ids is None:
            return
        if self._prompt is None:
            self._prompt = list(ids)
        elif self._prompt != ids:
            self._prompts_differ = True

    def outcome(self) -> Outcome:
        """Everything so far."""
        found = [self._choices[index] for index in sorted(self._choices)]
        complete = len(found) == self._n and all(choice.finish_reason is not None for choice in found)
        capture = self._capture(found)
        kept = capture is not CaptureLevel.TEXT
        choices = [
            _CHOICE.model_copy(
                update={
                    "index": index,
                    "message": _message(choice),
                    "finish_reason": choice.finish_reason,
                    "token_ids": choice.token_ids if kept else [],
                    "logprobs": choice.logprobs if capture is CaptureLevel.TOKENS else [],
                }
            )
            for index, choice in sorted(self._choices.items())
        ]
        return Outcome(list(self._prompt or ()) if kept else [], choices, capture, complete)

    def _capture(self, found: list[_Choice]) -> CaptureLevel:
        if not found or not self._prompt or self._prompts_differ or not all(choice.has_ids for choice in found):
            return CaptureLevel.TEXT
        sampled = sum(len(choice.token_ids) for choice in found)
        if self._completion_tokens is not None and self._completion_tokens > sampled:
            return CaptureLevel.TEXT  # the engine sampled more tokens than it told
        if any(_kinds(choice.token_ids) - {int} for choice in found):
            return CaptureLevel.TEXT
        for choice in found:
            if len(choice.logprobs) != len(choice.token_ids) or _kinds(choice.logprobs) - {int, float}:
                return CaptureLevel.IDS
            if not all(map(math.isfinite, choice.logprobs)):
                return CaptureLevel.IDS
        return CaptureLevel.TOKENS


def _kinds(values: list[Any]) -> set[type]:
    return set(map(type, values))


def _tokens(choice: _Choice, item: Mapping[str, Any]) -> None:
    ids = item.get("token_ids")
    if ids is not None:
        choice.has_ids = True
        choice.token_ids.extend(ids)
    logprobs = item.get("logprobs")
    if not isinstance(logprobs, dict):
        return
    if logprobs.get("content") is not None:
        choice.logprobs.extend(entry["logprob"] for entry in logprobs["content"])
    elif logprobs.get("token_logprobs") is not None:
        choice.logprobs.extend(logprobs["token_logprobs"])


def _delta(choice: _Choice, delta: Mapping[str, Any]) -> None:
    message = choice.message
    for key, value in delta.items():
        if value is None:
            continue
        if key in _JOINED:
            message[key] = (message.get(key) or "") + value
        elif key == "tool_calls":
            for part in value:
                add_tool_call(choice.tool_calls, part)
        elif key == "function_call":
            known = message.setdefault("function_call", {"name": "", "arguments": ""})
            known["name"] = known["name"] or value.get("name") or ""
            known["arguments"] += value.get("arguments") or ""
        else:
            message[key] = value


def place_of_call(part: Mapping[str, Any], calls: Mapping[int, Mapping[str, Any]], name: str = "id") -> int:
    """Which of the calls so far a part belongs to; their ids stand under ``name``. The next place for a new call."""
    index = part.get("index")
    if isinstance(index, int):
        return index
    # without an index: a new id begins a new call, anything else goes on with the last one
    last = max(calls, default=-1)
    fresh = last < 0 or (part.get("id") and part["id"] != calls[last].get(name))
    return last + 1 if fresh else last


def add_tool_call(calls: dict[int, dict[str, Any]], part: Mapping[str, Any]) -> None:
    """A tool call of a chunk, or more of one, into the calls so far by their place."""
    index = place_of_call(part, calls)
    known = calls.setdefault(index, {"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
    function = part.get("function") or {}
    known["id"] = known["id"] or part.get("id")
    known["type"] = part.get("type") or known["type"]
    known["function"]["name"] = known["function"]["name"] or function.get("name") or ""
    known["function"]["arguments"] += function.get("arguments") or ""


def _whole(message: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in message.items() if value is not None}
    if not kept.get("tool_calls"):
        kept.pop("tool_calls", None)
    return {"role": "assistant", "content": None, **kept}


def _message(choice: _Choice) -> dict[str, Any]:
    if not choice.tool_calls:
        return choice.message
    message = {**choice.message, "tool_calls": [choice.tool_calls[index] for index in sorted(choice.tool_calls)]}
    if message["content"] == "":
        message["content"] = None
    return message
