"""Breaks up strings in a request that spell the model's control tokens: a tool result must not open a turn.

A chat template pastes contents into text, and the tokenizer then reads ``<|im_end|>`` inside a tool result as the
control token of that name. Here such a string loses its meaning by one ordinary space after its first character:
``< |im_end|>``. A space, not a zero-width character: no tokenizer's normaliser removes it, and a reader sees what
happened. What counts as a control token is the engine's own list; where there is none, the shapes that the common
model families use.

Broken up are: contents and names of all messages, the app's own assistant messages (worked examples) with their tool
calls, and every string of the tools. Refused: ids (they come from the engine or the client, not from data), media,
and the model's own words, which stay what was sampled (``own``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

Message = dict[str, Any]

_ROUNDS = 8  # a space can only make a new control token if that one contains a space; then look again, this often

# Shapes of control tokens, for engines that do not list theirs.
_SHAPES = re.compile(
    r"<[|｜][^\s<>|｜]{1,64}[|｜]?>"  # <|im_start|>, <｜User｜>, <|turn>
    r"|<[^\s<>|｜/]{1,64}[|｜]>"  # <turn|>
    r"|</?(?:start_of_turn|end_of_turn|bos|eos|pad|unk|sop|eop|s|start_of_image|end_of_image)>"
    r"|<(?:SPECIAL_|extra_id_|unused)\d{1,4}>"
    r"|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_RESULTS|TOOL_CALLS|TOOL_CONTENT|ARGS|CALL_ID|THINK|gMASK)\]"
    r"|<</?SYS>>"
)


@lru_cache(maxsize=64)
def _pattern(special_tokens: tuple[str, ...]) -> re.Pattern[str]:
    """One expression for all control tokens, the longest first. A token of one character or only whitespace is no
    control token that data could spell by intent, and breaking it would spoil ordinary text."""
    names = sorted({t for t in special_tokens if len(t) > 1 and not t.isspace()}, key=lambda t: (-len(t), t))
    return re.compile("|".join(map(re.escape, names))) if names else _SHAPES


def break_up(text: str, special_tokens: Sequence[str] = ()) -> tuple[str, int]:
    """The text with every control token broken up, and how many there were."""
    pattern, count = _pattern(tuple(special_tokens)), 0
    for _ in range(_ROUNDS):
        text, found = pattern.subn(lambda match: match[0][0] + " " + match[0][1:], text)
        if not found:
            break
        count += found
    return text, count


class _Walk:
    """Copies a value, breaking up its strings; counts."""

    def __init__(self, special_tokens: Sequence[str]) -> None:
        self.special_tokens = tuple(special_tokens)
        self.count = 0

    def text(self, text: str) -> str:
        text, found = break_up(text, self.special_tokens)
        self.count += found
        return text

    def value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(k) if isinstance(k, str) else k: self.value(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(v) for v in value]
        return value

    def content(self, content: Any) -> Any:
        """A string, or a list of parts of which those with text are changed and media are not."""
        if isinstance(content, str):
            return self.text(content)
        if not isinstance(content, list):
            return content
        return [
            self.text(part)
            if isinstance(part, str)
            else {k: self.text(v) if k in ("text", "refusal") and isinstance(v, str) else v for k, v in part.items()}
            if isinstance(part, Mapping)
            else part
            for part in content
        ]

    def arguments(self, arguments: Any) -> Any:
        """Tool-call arguments: inside JSON text too, where a control token may be spelled with escapes."""
        if not isinstance(arguments, str):
            return self.value(arguments)
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            return self.text(arguments)
        before = self.count
        broken = self.value(parsed)
        return arguments if self.count == before else json.dumps(broken, ensure_ascii=False)

    def function(self, function: Any) -> Any:
        if not isinstance(function, Mapping):
            return function
        return {k: self.arguments(v) if k == "arguments" else self.value(v) for k, v in function.items()}

    def message(self, message: Mapping[str, Any]) -> Message:
        changed = dict(message)
        for key, value in message.items():
            if key == "content":
                changed[key] = self.content(value)
            elif key == "tool_calls" and isinstance(value, list):
                changed[key] = [
                    {**call, "function": self.function(call.get("function"))} if isinstance(call, Mapping) else call
                    for call in value
                ]
            elif key == "function_call":
                changed[key] = self.function(value)
            elif key not in ("role", "tool_call_id", "id"):
                changed[key] = self.value(value)
        return changed


def sanitize(
    messages: Sequence[Mapping[str, Any]], special_tokens: Sequence[str] = (), *, own: Collection[int] = ()
) -> tuple[list[Message], int]:
    """Copies of the messages with control tokens broken up, and how many were.

    ``special_tokens`` are the engine's; empty: the common shapes. ``own`` are the positions of messages that the
    model itself sampled: they are passed on as they are.
    """
    walk = _Walk(special_tokens)
    return [dict(m) if i in own else walk.message(m) for i, m in enumerate(messages)], walk.count


def sanitize_tools(
    tools: Sequence[Mapping[str, Any]] | None, special_tokens: Sequence[str] = ()
) -> tuple[list[Message] | None, int]:
    """Copies of the tools with control tokens broken up in every name, description and schema, and how many were."""
    if not tools:
        return None, 0
    walk = _Walk(special_tokens)
    return [walk.value(tool) for tool in tools], walk.count
