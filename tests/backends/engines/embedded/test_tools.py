"""Tool calls in text, whole and in pieces of every size: the same content, the same calls."""

from __future__ import annotations

import json

import pytest
from art_backends.engines.embedded.tools import HermesParser, PlainText
from hypothesis import given
from hypothesis import strategies as st

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
SUB = '<tool_call>{"arguments": {}, "name": "sub"}</tool_call>'


def read(text: str, size: int, *, single: bool = False) -> tuple[str, list[tuple[str, dict]]]:
    parser = HermesParser(single=single)
    content, calls = "", []
    for at in range(0, len(text), size):
        more, found = parser.push(text[at : at + size])
        content, calls = content + more, calls + found
    more, found = parser.finish()
    content, calls = content + more, calls + found
    assert parser.calls == len(calls)
    return content, [(call.name, json.loads(call.arguments)) for call in calls]


CASES = [
    ("plain words", "plain words", []),
    ("  spaces kept \n", "  spaces kept \n", []),
    (ADD, "", [("add", {"a": 1, "b": "é"})]),
    (f"\n\n{ADD}\n", "", [("add", {"a": 1, "b": "é"})]),
    (f"Let me see.\n{ADD}", "Let me see.", [("add", {"a": 1, "b": "é"})]),
    (f"{ADD}\n{SUB}", "", [("add", {"a": 1, "b": "é"}), ("sub", {})]),
    (f"{ADD} and \n{SUB} done", "and\ndone", [("add", {"a": 1, "b": "é"}), ("sub", {})]),
    ("a < b <tool", "a < b <tool", []),
    ("<tool_call>{not json}</tool_call>", "<tool_call>{not json}</tool_call>", []),
    (f"x <tool_call>oops</tool_call> {SUB}", "x <tool_call>oops</tool_call>", [("sub", {})]),
    (f'<tool_call>{{"name": "a" {SUB}', '<tool_call>{"name": "a"', [("sub", {})]),
    ('<tool_call>{"name": "add"}</tool_call>', '<tool_call>{"name": "add"}</tool_call>', []),
    ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', '<tool_call>{"name": 3, "arguments": {}}</tool_call>', []),
    ('<tool_call>{"name": "a", "arguments": [1]}</tool_call>', None, []),
    ('<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', None, []),
    ('<tool_call>{"name": "a", "arguments": {"x": 1e999}}</tool_call>', None, []),
    ('<tool_call>{"name": "a", "arguments": {"x": "\\ud800"}}</tool_call>', None, []),
    ("<tool_call>" + "[" * 100_000 + "</tool_call>", None, []),
    ('<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("a", {"x": 1})]),
    # the closing tag was not sampled, the call is whole
    ('<tool_call>\n{"name": "a", "arguments": {}}\n', "", [("a", {})]),
    ('<tool_call>\n{"name": "a", "argum', '<tool_call>\n{"name": "a", "argum', []),
    # a tag within a string is part of the string
    ('<tool_call>{"name": "a", "arguments": {"x": "</tool_call>"}}</tool_call>', "", [("a", {"x": "</tool_call>"})]),
    # a string that is never closed ends at its own tag
    (f'<tool_call>{{"name": "a</tool_call>\n{SUB}', '<tool_call>{"name": "a</tool_call>', [("sub", {})]),
    ("<tool_call><tool_call>", "<tool_call><tool_call>", []),
    ("", "", []),
]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10**6])
@pytest.mark.parametrize(("text", "content", "calls"), CASES)
def test_calls_and_content(text: str, content: str | None, calls: list, size: int) -> None:
    assert read(text, size if len(text) < 1000 else max(size, 5000)) == (text if content is None else content, calls)


def test_content_streams_before_the_call_and_a_call_is_given_whole() -> None:
    parser = HermesParser()
    assert parser.push("Hello ") == ("Hello", [])
    assert parser.push("you <too") == (" you", [])
    assert parser.push("th> ") == (" <tooth>", [])
    assert parser.push('<tool_call>{"name": "a", ') == ("", [])
    content, calls = parser.push('"arguments": {}}</tool_call>')
    assert (content, [call.name for call in calls]) == ("", ["a"])
    assert calls[0].id.startswith("chatcmpl-tool-")


def test_single_gives_the_first_call_only() -> None:
    assert read(f"{ADD}{SUB}", 4, single=True) == ("", [("add", {"a": 1, "b": "é"})])


def test_ids_differ() -> None:
    _, calls = HermesParser().push(f"{SUB}{SUB}")
    assert calls[0].id != calls[1].id


def test_plain_text_parses_nothing() -> None:
    parser = PlainText()
    assert parser.push(ADD) == (ADD, [])
    assert parser.finish() == ("", [])


PARTS = ["<tool_call>", "</tool_call>", '{"name": "a", "arguments": {}}', '"', "\n", " ", "x", "<", "{", "\\"]


@given(st.lists(st.sampled_from(PARTS), max_size=12).map("".join), st.integers(1, 9))
def test_pieces_read_as_the_whole_and_no_word_is_lost(text: str, size: int) -> None:
    content, calls = read(text, size)
    assert (content, calls) == read(text, 10**6)
    if not calls:
        assert content == text
