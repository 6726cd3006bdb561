"""Constrained answers: a random walk through the masks always writes what the schema asks for."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from art_backends.engines.embedded.protocol import ApiError, ChatBody, parse
from art_backends.engines.embedded.structured import Grammars
from art_backends.engines.embedded.text import Vocabulary
from art_backends.engines.embedded.tools import HermesParser

USER = [{"role": "user", "content": "x"}]
POINT = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}, "x": {"$ref": "#/$defs/small"}},
    "required": ["kind", "x"],
    "additionalProperties": False,
    "$defs": {"small": {"type": "integer", "minimum": 0, "maximum": 99}},
}
TOOLS = [
    {"type": "function", "function": {"name": "point", "parameters": POINT}},
    {"type": "function", "function": {"name": 'qu"ote'}},
]


def body(**fields: Any) -> ChatBody:
    return parse(ChatBody, {"messages": USER, **fields})


def walk(vocabulary: Vocabulary, request: ChatBody, *, seed: int, limit: int = 400) -> str:
    """Sample uniformly among the allowed tokens, favouring an end where one is allowed."""
    masks = Grammars(vocabulary).masks(request, 1)
    assert masks is not None
    choose, ids = random.Random(seed), []
    for _ in range(limit):
        allowed = masks[0].allowed()
        assert allowed is not None
        assert allowed.shape == (vocabulary.size,)
        options = set(allowed.nonzero().flatten().tolist())
        assert options, "a row must always be able to go on"
        ends = options & vocabulary.eos_token_ids
        token = min(ends) if ends else choose.choice(sorted(options))
        masks[0].accept(token)
        if token in vocabulary.eos_token_ids:
            return vocabulary.decode(ids)
        ids.append(token)
    return vocabulary.decode(ids)


@pytest.fixture(params=[False, True], ids=["tags as text", "tags as tokens"])
def vocabulary(request: pytest.FixtureRequest, new_tokenizer: Callable[..., Any]) -> Vocabulary:
    tokenizer = new_tokenizer(tags=request.param)
    return Vocabulary(tokenizer, size=len(tokenizer) + 5, eos_token_ids=[tokenizer.bos_token_id])


def test_nothing_asked_no_mask(vocabulary: Vocabulary) -> None:
    grammars = Grammars(vocabulary)
    for request in (
        body(),
        body(response_format={"type": "text"}),
        body(tools=TOOLS),
        body(tools=TOOLS, tool_choice="auto"),
        body(tools=TOOLS, tool_choice="none"),
    ):
        assert grammars.masks(request, 2) is None


@pytest.mark.parametrize("seed", range(3))
def test_json_schema(vocabulary: Vocabulary, seed: int) -> None:
    request = body(response_format={"type": "json_schema", "json_schema": {"name": "point", "schema": POINT}})
    said = json.loads(walk(vocabulary, request, seed=seed))
    assert said["kind"] in "ab"
    assert 0 <= said["x"] <= 99


def test_json_object(vocabulary: Vocabulary) -> None:
    first = Grammars(vocabulary).masks(body(response_format={"type": "json_object"}), 1)
    assert first is not None
    allowed = first[0].allowed()
    assert allowed is not None
    assert {vocabulary.piece(int(index)) for index in allowed.nonzero().flatten()} == {"{"}


@pytest.mark.parametrize("seed", range(4))
def test_required_tools_read_as_calls(vocabulary: Vocabulary, seed: int) -> None:
    said = walk(vocabulary, body(tools=TOOLS, tool_choice="required"), seed=seed)
    content, calls = HermesParser().push(said)
    assert content == ""
    assert calls
    for call in calls:
        assert call.name in ("point", 'qu"ote')
        assert set(json.loads(call.arguments)) == ({"kind", "x"} if call.name == "point" else set())


def test_a_named_tool_is_the_only_one(vocabulary: Vocabulary) -> None:
    choice = {"type": "function", "function": {"name": "point"}}
    for seed in range(3):
        _, calls = HermesParser().push(walk(vocabulary, body(tools=TOOLS, tool_choice=choice), seed=seed))
        assert [call.name for call in calls] == ["point"]


def test_required_may_go_on_with_another_call_unless_told_not_to(vocabulary: Vocabulary) -> None:
    one = '<tool_call>\n{"name": "point", "arguments": {"kind": "a", "x": 1}}\n</tool_call>'
    for parallel, more in ((None, True), (False, False)):
        request = body(tools=TOOLS, tool_choice="required", parallel_tool_calls=parallel)
        masks = Grammars(vocabulary).masks(request, 1)
        assert masks is not None
        for index in vocabulary.encode(one):
            masks[0].accept(index)
        allowed = masks[0].allowed()
        assert allowed is not None
        options = set(allowed.nonzero().flatten().tolist())
        assert vocabulary.eos_token_ids <= options
        assert (vocabulary.encode("\n")[0] in options) is more


def test_rows_do_not_share_their_state(vocabulary: Vocabulary) -> None:
    masks = Grammars(vocabulary).masks(body(response_format={"type": "json_object"}), 2)
    assert masks is not None
    masks[0].accept(vocabulary.encode("{")[0])
    left, right = masks[0].allowed(), masks[1].allowed()
    assert left is not None
    assert right is not None
    assert not left.equal(right)


def test_a_schema_that_cannot_be_used(vocabulary: Vocabulary) -> None:
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    with pytest.raises(ApiError, match="nonsense") as caught:
        Grammars(vocabulary).masks(body(response_format=wrong), 1)
    assert (caught.value.status, caught.value.param) == (400, "response_format")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": 3}}}}
    with pytest.raises(ApiError) as caught:
        Grammars(vocabulary).masks(body(tools=[tool], tool_choice="required"), 1)
    assert caught.value.param == "tools"
