"""Tool calls in the model's words: the Hermes format, ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``.

One incremental parser serves streams and whole answers alike, so both see the same calls. Text outside of calls
streams at once; a call is given when it is complete and valid, its name and then its arguments.

It refuses to mend: what is no valid call (broken JSON, no name, arguments that are no object) stays content, word
for word, and a call is never half given. It does not check names or arguments against the tools of the request.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from art_backends.engines.embedded.text import overlap

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One parsed call; ``arguments`` is a JSON object as text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"chatcmpl-tool-{uuid.uuid4().hex}")

    def as_openai(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class HermesParser:
    """Feed text with ``push`` and ``finish``; both give (content, calls) that became certain.

    White space next to a call belongs to the format and is dropped; words on both sides of a call are put on two
    lines. With ``single`` only the first call is given
    (``parallel_tool_calls: false``); later ones are dropped, as vLLM does. ``calls`` counts those given.
    """

    def __init__(self, *, single: bool = False) -> None:
        self._single = single
        self._text = ""  # not decided yet
        self._gap = ""  # the white space before a call that is not decided yet
        self._scanned = 0  # where to look for the next closing tag
        self._after_call = False  # nothing but white space came since the last call
        self._said = False  # whether content was given
        self.calls = 0

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        self._text += text
        return self._gather(ended=False)

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The answer has ended: what is held back; a complete call may lack its closing tag."""
        return self._gather(ended=True)

    def _gather(self, *, ended: bool) -> tuple[str, list[ToolCall]]:
        content: list[str] = []
        calls: list[ToolCall] = []
        for piece in self._pieces(ended=ended):
            if isinstance(piece, str):
                text = piece.lstrip() if self._after_call else piece
                if not text:
                    continue
                content.append("\n" + text if self._after_call and self._said else text)
                self._said, self._after_call = True, False
            else:
                self._after_call = True
                if not (self._single and self.calls):
                    self.calls += 1
                    calls.append(piece)
        return "".join(content), calls

    def _pieces(self, *, ended: bool) -> Iterator[str | ToolCall]:
        while self._text:
            if self._text.startswith(OPEN):
                decision = self._decide(ended=ended)
                if decision is None:
                    return
                call, size = decision
                words = self._gap + self._text[:size]
                self._text, self._gap, self._scanned = self._text[size:], "", 0
                yield words if call is None else call
                continue
            at = self._text.find(OPEN)
            if at >= 0:
                words = self._text[:at].rstrip()
                self._gap, self._text = self._text[len(words) : at], self._text[at:]
                yield words
            elif ended:
                words, self._text = self._text, ""
                yield words
            else:
                # what may yet be the beginning of a call, and the white space before it, waits
                words = self._text[: len(self._text) - overlap(self._text, OPEN)].rstrip()
                self._text = self._text[len(words) :]
                yield words
                return

    def _decide(self, *, ended: bool) -> tuple[ToolCall | None, int] | None:
        """(the call, or None for plain words; how much of the text it takes), or None: more text is needed."""
        start = max(self._scanned, len(OPEN))
        while (at := self._text.find(CLOSE, start)) >= 0:
            call = parse_call(self._text[len(OPEN) : at])
            start = at + len(CLOSE)
            if call is not None:
                return (call, start) if isinstance(call, ToolCall) else (None, self._words())
            # that closing tag stands within a string of the arguments
        self._scanned = max(start, len(self._text) - len(CLOSE) + 1)
        if not ended:
            return None
        call = parse_call(self._text[len(OPEN) :])
        return (call, len(self._text)) if isinstance(call, ToolCall) else (None, self._words())

    def _words(self) -> int:
        """Length of a broken call: to its closing tag, or to where another call opens."""
        ends = [self._text.find(OPEN, len(OPEN)), self._text.find(CLOSE) + len(CLOSE)]
        size = min((end for end in ends if end >= len(OPEN)), default=len(OPEN))
        return len(self._text[:size].rstrip())


class _Broken:
    """Marks text that is no call, whatever may follow it."""


_BROKEN = _Broken()


def parse_call(body: str) -> ToolCall | _Broken | None:
    """A call; None if the text ends within a string (more text may complete it); else _BROKEN."""
    try:
        data = json.loads(body)
        if not isinstance(data, dict) or not isinstance(data.get("name"), str) or not data["name"]:
            return _BROKEN
        arguments = data.get("arguments")
        if isinstance(arguments, str):  # some models quote the object
            arguments = json.loads(arguments)
        if not isinstance(arguments, dict):
            return _BROKEN
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (data["name"] + text).encode("utf-8")  # a lone surrogate cannot be sent
        return ToolCall(data["name"], text)
    except json.JSONDecodeError as error:
        return None if error.msg.startswith("Unterminated string") and error.doc is body else _BROKEN
    except (ValueError, RecursionError):
        return _BROKEN


class PlainText:
    """The parser of requests without tools: everything is content."""

    calls = 0

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        return text, []

    def finish(self) -> tuple[str, list[ToolCall]]:
        return "", []


Parser = HermesParser | PlainText
