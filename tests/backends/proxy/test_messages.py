"""Anthropic's Messages over chat completions: the anthropic SDK in front, an engine of scripted answers behind."""

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx2
import pytest
from art_backends.proxy.messages.request import chat_request
from art_backends.proxy.wire import BadRequestError
from art_backends.trajectories import CallStatus, CaptureLevel

from tests.backends.proxy.fake_engine import WAIT, World, answer, chunk, ids_of, sse, status
from tests.backends.proxy.test_responses import called, deltas, whole

TOOL = {
    "name": "look_up",
    "description": "Looks up.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ASKED: Any = {"model": "claude", "max_tokens": 50, "messages": [{"role": "user", "content": "How is Rome?"}]}


@pytest.fixture
async def sdk(w: World) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with (
        httpx2.AsyncClient(trust_env=False) as client,
        anthropic.AsyncAnthropic(
            base_url=w.url, api_key="train", max_retries=0, timeout=WAIT, http_client=client
        ) as made,
    ):
        yield made


def read(**body: Any) -> dict[str, Any]:
    return chat_request({**ASKED, **body})


# what is asked


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            [{"role": "user", "content": "a\nb"}],
        ),
        (
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}},
                        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "read me"}},
                    ],
                }
            ],
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
                        {"type": "text", "text": "read me"},
                    ],
                }
            ],
        ),
        (
            [
                {"role": "user", "content": "x"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": ""},
                        {"type": "redacted_thinking", "data": "?"},
                        {"type": "text", "text": "Let me see."},
                        {"type": "tool_use", "id": "c1", "name": "look_up", "input": {"city": "Rome"}},
                        {"type": "tool_use", "id": "c2", "name": "look_up", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "And?"},
                        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "sunny"}]},
                        {"type": "tool_result", "tool_use_id": "c2", "is_error": True},
                    ],
                },
            ],
            [
                {"role": "user", "content": "x"},
                called(("c1", '{"city":"Rome"}'), ("c2", "{}"), text="Let me see.", reasoning="hm"),
                {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
                {"role": "tool", "tool_call_id": "c2", "content": ""},
                {"role": "user", "content": "And?"},
            ],
        ),
    ],
)
def test_blocks_become_messages(given: Any, messages: list[Any]) -> None:
    assert read(messages=given)["messages"] == messages


def test_fields_take_chat_s_names_and_unknown_ones_pass() -> None:
    chat = read(
        system=[{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}],
        stop_sequences=["END"],
        temperature=0.5,
        top_k=5,
        tools=[TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        thinking={"type": "disabled"},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        stream=True,
        metadata={"user_id": "u"},
        a_new_field=1,
    )
    function = {"name": "look_up", "description": "Looks up.", "parameters": TOOL["input_schema"]}
    assert chat == {
        "model": "claude",
        "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "How is Rome?"}],
        "max_tokens": 50,
        "stop": ["END"],
        "temperature": 0.5,
        "top_k": 5,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "low",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "output", "schema": {"type": "object"}, "strict": True},
        },
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "a_new_field": 1,
    }


@pytest.mark.parametrize(
    ("choice", "asked"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "look_up"}, {"type": "function", "function": {"name": "look_up"}}),
    ],
)
def test_tool_choices(choice: Any, asked: Any) -> None:
    assert read(tools=[TOOL], tool_choice=choice)["tool_choice"] == asked
    assert "tool_choice" not in read(tool_choice=choice), "without tools there is nothing to choose"


def test_an_answer_that_was_begun_is_gone_on_with() -> None:
    begun = [*ASKED["messages"], {"role": "assistant", "content": "It is"}]
    chat = read(messages=begun)
    assert (chat["continue_final_message"], chat["add_generation_prompt"]) == (True, False)
    assert chat["messages"] == begun


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"max_tokens": None}, "max_tokens: a whole number"),
        ({"max_tokens": True}, "max_tokens: a whole number"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\[0\].*web_search_20250305"),
        ({"tools": [{}]}, r"tools\[0\]"),
        ({"tools": {}}, None),
        ({"tools": [TOOL], "tool_choice": {"type": "maybe"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        ({"n": 2}, "n must be 1"),
        ({"container": "c"}, "container lives on Anthropic's servers"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"messages": 1}, "messages must be a list"),
        ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\].*role"),
        ({"messages": [{"role": "user", "content": 1}]}, r"messages\[0\].*content"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "file"}}]}]}, "document"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]}, "server_tool_use"),
        ({"system": 1}, "system is a text"),
        ({"thinking": "yes"}, "thinking must be an object"),
        ({"output_format": {"type": "grammar"}}, "json_schema"),
    ],
)
def test_what_cannot_be_a_chat_completion_is_refused_by_name(body: dict[str, Any], said: str | None) -> None:
    if said is None:
        assert "tools" not in read(**body)
        return
    with pytest.raises(BadRequestError, match=said):
        read(**body)


# what is answered


async def test_a_message_and_its_record(w: World, sdk: anthropic.AsyncAnthropic) -> None:
    w.engine.script.append(whole({"role": "assistant", "content": "Sunny.", "reasoning": "hm"}))
    got = await sdk.messages.create(**ASKED, system="Be short.")
    assert [block.type for block in got.content] == ["thinking", "text"]
    assert (got.content[0].thinking, got.content[1].text) == ("hm", "Sunny.")
    assert (got.model, got.role, got.stop_reason, got.stop_sequence) == ("claude", "assistant", "end_turn", None)
    assert (got.usage.input_tokens, got.usage.output_tokens) == (3, 2)
    call = w.store.only
    assert (call.status, call.capture, call.choices[0].token_ids) == (CallStatus.OK, CaptureLevel.TOKENS, ids_of("x"))
    assert call.request["messages"][0] == {"role": "system", "content": "Be short."}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_loop(w: World, sdk: anthropic.AsyncAnthropic, stream: bool) -> None:
    asked = called(("c1", '{"city": "Rome"}'), ("c2", "{}"), text="Let me see.")
    if stream:
        first, second = asked["tool_calls"]
        pieces = [{"function": {"arguments": a}} for a in ("", '{"city": ', '"Rome"}')]
        w.engine.script.append(
            deltas(
                {"content": "Let me "},
                {"content": "see."},
                {"tool_calls": [{**first, "index": 0, "function": {"name": "look_up", "arguments": ""}}]},
                {"tool_calls": [{"index": 0, **pieces[1]}, {**second, "index": 1}]},
                {"tool_calls": [{"index": 0, **pieces[2]}]},
                finish="tool_calls",
            )
        )
        async with sdk.messages.stream(**ASKED, tools=[TOOL]) as answered:
            got = await answered.get_final_message()
    else:
        w.engine.script.append(whole(asked, "tool_calls"))
        got = await sdk.messages.create(**ASKED, tools=[TOOL])
    assert [block.type for block in got.content] == ["text", "tool_use", "tool_use"]
    assert [(block.id, block.input) for block in got.content[1:]] == [("c1", {"city": "Rome"}), ("c2", {})]
    assert (got.content[0].text, got.stop_reason) == ("Let me see.", "tool_use")
    results: Any = [{"type": "tool_result", "tool_use_id": b.id, "content": "sunny"} for b in got.content[1:]]
    turns = [{"role": "assistant", "content": got.content}, {"role": "user", "content": results}]
    await sdk.messages.create(**{**ASKED, "messages": [*ASKED["messages"], *turns]}, tools=[TOOL])
    sent = w.engine.chats[1].body["messages"]
    assert [json.loads(c["function"]["arguments"]) for c in sent[1]["tool_calls"]] == [{"city": "Rome"}, {}]
    assert [(m["role"], m.get("tool_call_id")) for m in sent[2:]] == [("tool", "c1"), ("tool", "c2")]


async def test_the_raw_events_of_a_stream(w: World, sdk: anthropic.AsyncAnthropic) -> None:
    call = {"index": 0, "id": "c1", "function": {"name": "look_up", "arguments": '{"city": "Rome"}'}}
    pieces = [{"reasoning": "h"}, {"reasoning": "m"}, {"content": "a"}, {"content": "b"}, {"tool_calls": [call]}]
    w.engine.script.append(deltas(*pieces, finish="tool_calls"))
    stream = await sdk.messages.create(**ASKED, tools=[TOOL], stream=True)
    events = [event async for event in stream]
    assert [event.type for event in events] == [
        "message_start",
        *["content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"] * 2,
        *["content_block_start", "content_block_delta", "content_block_stop"],
        "message_delta",
        "message_stop",
    ]
    assert [event.index for event in events[1:-2]] == [0] * 4 + [1] * 4 + [2] * 3
    assert (events[-2].delta.stop_reason, events[-2].usage.input_tokens, events[-2].usage.output_tokens) == (
        "tool_use",
        3,
        5,
    )


@pytest.mark.parametrize(
    ("finish", "stop", "told"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("stop", 7, ("end_turn", None)),  # the id of a token: no sequence of the app's
        ("length", None, ("max_tokens", None)),
        ("content_filter", None, ("refusal", None)),
    ],
)
async def test_stop_reasons(w: World, sdk: anthropic.AsyncAnthropic, finish: str, stop: Any, told: Any) -> None:
    w.engine.script.append(whole({"role": "assistant", "content": "x"}, finish, stop_reason=stop))
    got = await sdk.messages.create(**ASKED, stop_sequences=["END"])
    assert (got.stop_reason, got.stop_sequence) == told


@pytest.mark.parametrize("written", ['{"city": ', "[1]", "Rome"])
@pytest.mark.parametrize("stream", [False, True])
async def test_arguments_that_are_no_object_reach_the_app_as_they_are(
    w: World, sdk: anthropic.AsyncAnthropic, written: str, stream: bool
) -> None:
    call = called(("c1", written))["tool_calls"]
    w.engine.script.append(
        deltas({"tool_calls": [{**call[0], "index": 0}]}, finish="tool_calls")
        if stream
        else whole(called(("c1", written)), "tool_calls")
    )
    if stream:
        async with sdk.messages.stream(**ASKED, tools=[TOOL]) as answered:
            got = await answered.get_final_message()
    else:
        got = await sdk.messages.create(**ASKED, tools=[TOOL])
    assert got.content[0].input == {"INVALID_JSON": written}


async def test_numbers_come_as_the_model_wrote_them(w: World) -> None:
    written = '{"id": 123456789012345678901234567890, "x": 1.50}'
    w.engine.script.append(whole(called(("c1", written)), "tool_calls"))
    reply = await w.http.post("/v1/messages", json={**ASKED, "tools": [TOOL]})
    assert f'"input":{written}' in reply.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_forced_call_ends_with_a_tool_use_whatever_the_engine_says(
    w: World, sdk: anthropic.AsyncAnthropic, stream: bool
) -> None:
    call = called(("c1", "{}"))
    w.engine.script.append(deltas({"tool_calls": [{**call["tool_calls"][0], "index": 0}]}) if stream else whole(call))
    if stream:
        async with sdk.messages.stream(**ASKED, tools=[TOOL]) as answered:
            got = await answered.get_final_message()
    else:
        got = await sdk.messages.create(**ASKED, tools=[TOOL], tool_choice={"type": "tool", "name": "look_up"})
    assert got.stop_reason == "tool_use"


async def test_what_claude_code_sends_by_itself_is_taken(w: World, sdk: anthropic.AsyncAnthropic) -> None:
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    await sdk.messages.create(**ASKED, extra_body={"context_management": edits})
    assert "context_management" not in w.engine.chats[0].body


ODD: list[dict[str, Any]] = [
    {"messages": [{"role": [], "content": "x"}]},
    {"messages": [{"role": "user", "content": [{"type": []}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image", "source": 5}]}]},
    {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": 5}]}]},
    {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": 5}]}]},
    {"messages": [{"role": "assistant", "content": [{"type": "text", "text": 5}]}]},
    {"tools": [TOOL], "tool_choice": {"type": []}},
    {"tools": [5]},
    {"tools": [{**TOOL, "type": []}]},
    {"tools": [{**TOOL, "input_schema": 5}]},
    {"thinking": {"type": []}},
    {"chat_template_kwargs": 5, "thinking": {"type": "enabled"}},
    {"output_config": 5},
    {"output_config": {"format": 5}},
    {"stop_sequences": 5},
    {"max_tokens": "9"},
]


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_no_odd_request_is_the_server_s_fault(w: World, odd: dict[str, Any], path: str) -> None:
    reply = await w.http.post(path, json={**ASKED, **odd})
    assert reply.status_code in (200, 400, 501), reply.text  # the engine here has no /tokenize


async def test_comments_of_the_engine_are_pings(w: World) -> None:
    head = b'data: {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}]}\n\n'
    w.engine.script.append(sse([], raw=[b": early\n\n", head, b": late\n\n", b"data: [DONE]\n\n"]))
    reply = await w.http.post("/v1/messages", json={**ASKED, "stream": True})
    assert reply.text.startswith(": early\n\n")
    assert 'event: ping\ndata: {"type":"ping"}\n\n' in reply.text
    assert reply.text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')


# errors


@pytest.mark.parametrize(
    ("code", "kind", "raised"),
    [
        (400, "invalid_request_error", anthropic.BadRequestError),
        (422, "invalid_request_error", anthropic.UnprocessableEntityError),
        (429, "rate_limit_error", anthropic.RateLimitError),
        (500, "api_error", anthropic.InternalServerError),
        (503, "overloaded_error", anthropic.InternalServerError),
    ],
)
async def test_an_engine_s_refusals_have_anthropic_s_envelope(
    w: World, sdk: anthropic.AsyncAnthropic, code: int, kind: str, raised: type[anthropic.APIStatusError]
) -> None:
    w.engine.script.append(status(code, {"error": {"message": "no", "code": "x"}}, retry_after="7"))
    with pytest.raises(raised) as refused:
        await sdk.messages.create(**ASKED)
    assert refused.value.body == {"type": "error", "error": {"type": kind, "message": "no"}, "request_id": None}
    assert refused.value.response.headers["retry-after"] == "7"


async def test_the_proxy_s_refusals_have_it_too(w: World, sdk: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="container lives") as refused:
        await sdk.messages.create(**ASKED, extra_body={"container": "c"})
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    w.policy.models = ["other"]
    with pytest.raises(anthropic.NotFoundError, match="no policy answers for it") as unknown:
        await sdk.messages.create(**ASKED)
    assert unknown.value.body["error"]["type"] == "not_found_error"


async def collect(stream: Any, seen: list[Any]) -> None:
    async for event in stream:
        seen.append(event)


@pytest.mark.parametrize("cut", [False, True])
async def test_a_stream_that_fails_has_an_error_and_no_end(w: World, sdk: anthropic.AsyncAnthropic, cut: bool) -> None:
    begun = chunk([{"index": 0, "delta": {"content": "Su"}, "finish_reason": None, "token_ids": [1]}])
    told = [] if cut else [b'{"error": {"message": "out of memory"}}', b"[DONE]"]
    w.engine.script.append(sse([begun, *told], cut=cut))
    seen: list[Any] = []
    with pytest.raises(anthropic.APIStatusError, match="broke off" if cut else "out of memory"):
        await collect(await sdk.messages.create(**ASKED, stream=True), seen)
    assert "message_stop" not in [event.type for event in seen]
    assert w.store.only.status is CallStatus.ERROR


async def test_media_at_an_address_are_not_fetched(w: World, sdk: anthropic.AsyncAnthropic) -> None:
    image = {"type": "image", "source": {"type": "url", "url": "http://169.254.169.254/"}}
    with pytest.raises(anthropic.BadRequestError, match="not fetched"):
        await sdk.messages.create(**{**ASKED, "messages": [{"role": "user", "content": [image]}]})
    assert not w.engine.chats


async def test_the_answer_of_a_model_without_ids_for_its_calls_gets_some(
    w: World, sdk: anthropic.AsyncAnthropic
) -> None:
    w.engine.script.append(answer("", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": ""}}]))
    got = await sdk.messages.create(**ASKED, tools=[TOOL])
    assert got.content[0].id.startswith("toolu_")
    assert got.content[0].input == {}
