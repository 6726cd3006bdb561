"""Constrained answers: ``response_format`` and forced tools as token masks, through llguidance.

``Grammars`` compiles a grammar once per request and gives each row a mask of its own. Forced tools are sampled in
the Hermes format (``tools.py``), so that the same parser reads them. JSON is written with the spaces of
Python's json.dumps and no others: a small model would otherwise go on writing spaces for ever.

It refuses schemas that llguidance cannot express, as ApiError 400 with its reason. A client knows that an answer was
constrained only by having asked for it: the logprobs are those of the masked distribution.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

import llguidance.hf
import torch
from llguidance import LLMatcher, LLTokenizer

from art_backends.engines.embedded.protocol import ApiError, ChatBody, NamedTool, ResponseFormat, SamplingBody, Tool
from art_backends.engines.embedded.text import Vocabulary
from art_backends.engines.embedded.tools import CLOSE, OPEN

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class GrammarMask:
    """The mask of one row; the engine's thread calls it. Follows the TokenMask protocol of ``requests.py``."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def allowed(self) -> torch.Tensor | None:
        """Bool [vocab]. A row whose grammar can go no further may only end."""
        return torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8) != 0

    def accept(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)


class Grammars:
    """Compiles grammars for one vocabulary. The first use reads the tokenizer (about a second for a large one)."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None

    def masks(self, body: SamplingBody, rows: int) -> list[GrammarMask] | None:
        """One mask per row, or None if the request constrains nothing. Blocks: call it in a thread."""
        grammar = self._grammar(body)
        if grammar is None:
            return None
        tokenizer = self._load()
        problem = LLMatcher.validate_grammar(grammar, tokenizer)
        if problem and not problem.startswith("WARNING"):
            raise ApiError(f"the schema cannot be used to constrain the answer: {problem}", param=_param(body))
        first = LLMatcher(tokenizer, grammar, log_level=0)
        if first.is_error():
            raise ApiError(f"the schema cannot be used to constrain the answer: {first.get_error()}")
        return [GrammarMask(first), *(GrammarMask(first.deep_copy()) for _ in range(rows - 1))]

    def _load(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = llguidance.hf.from_tokenizer(
                    self._vocabulary.tokenizer,
                    n_vocab=max(self._vocabulary.size, len(self._vocabulary.tokenizer)),
                    eos_token=sorted(self._vocabulary.eos_token_ids),
                )
            return self._tokenizer

    def _grammar(self, body: SamplingBody) -> str | None:
        forced = _forced_tools(body) if isinstance(body, ChatBody) else None
        if forced is not None:
            assert isinstance(body, ChatBody)
            many = body.tool_choice == "required" and body.parallel_tool_calls is not False
            return LLMatcher.grammar_from_lark(self._calls_grammar(forced, many=many))
        schema = _schema(body.response_format)
        if schema is None:
            return None
        return LLMatcher.grammar_from_json_schema(json.dumps({**schema, "x-guidance": _SPACING}))

    def _calls_grammar(self, tools: Sequence[Tool], *, many: bool) -> str:
        names = [f"tool_{index}" for index in range(len(tools))]
        lines = [
            'start: call ("\\n" call)*' if many else "start: call",
            f'call: {self._tag(OPEN)} "\\n" ({" | ".join(names)}) "\\n" {self._tag(CLOSE)}',
        ]
        for name, tool in zip(names, tools, strict=True):
            # each schema is a root of its own, so that its "#/$defs/…" still point where they should
            schema = tool.function.parameters
            if schema is None:
                schema = {"type": "object", "properties": {}, "additionalProperties": False}
            head = json.dumps('{"name": ' + json.dumps(tool.function.name) + ', "arguments": ')
            lines.append(f'{name}: {head} {name}_arguments "}}"')
            lines.append(f"{name}_arguments: %json {json.dumps(_object(schema))}")
        return "\n".join(lines) + "\n"

    def _tag(self, tag: str) -> str:
        """A tag that is a control token of the vocabulary must be matched as that token."""
        index = self._vocabulary.tokenizer.get_vocab().get(tag)
        if index is not None and self._load().is_special_token(index):
            return f"<[{index}]>"
        return json.dumps(tag)


def _object(schema: dict[str, Any]) -> dict[str, Any]:
    """Arguments are an object whatever else the schema leaves open."""
    return {"type": "object", **schema, "x-guidance": _SPACING}


def _forced_tools(body: ChatBody) -> list[Tool] | None:
    tools = body.tools or []
    if body.tool_choice == "required":
        return tools
    if isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        return [tool for tool in tools if tool.function.name == name][:1]
    return None


def _schema(wanted: ResponseFormat | None) -> dict[str, Any] | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object" or wanted.json_schema is None:
        return {"type": "object"}
    schema: dict[str, Any] = wanted.json_schema["schema"]
    return schema


def _param(body: SamplingBody) -> str:
    return "tools" if isinstance(body, ChatBody) and _forced_tools(body) is not None else "response_format"
