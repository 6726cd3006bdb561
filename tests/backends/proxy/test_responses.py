"""OpenAI's Responses over chat completions: the openai SDK in front, an engine of scripted answers behind."""

from collections.abc import Callable
from typing import Any

import openai
import pytest
from art_backends.proxy.responses import Memory
from art_backends.proxy.responses.request import chat_request
from art_backends.proxy.wire import BadRequestError
from art_backends.trajectories import CallStatus, CaptureLevel
from pydantic import BaseModel

from tests.backends.proxy.fake_engine import World, answer, chunk, ids_of, logprobs_of, sse, status

FUNCTION = {
    "type": "function",
    "name": "look_up",
    "description": "Looks up.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}


def called(*calls: tuple[str, str], text: str | None = None, **more: Any) -> dict[str, Any]:
    """A chat message with calls of look_up: id and arguments."""
    made = [{"id": i, "type": "function", "function": {"name": "look_up", "arguments": a}} for i, a in calls]
    return {"role": "assistant", "content": text, "tool_calls": made, **more}


def whole(message: dict[str, Any], finish: str = "stop", **more: Any) -> Any:
    ids = ids_of("x")
    choice = {"index": 0, "message": message, "finish_reason": finish, "token_ids": ids, "logprobs": logprobs_of(ids)}
    usage = {"prompt_tokens": 3, "completion_tokens": len(ids), "total_tokens": 3 + len(ids)}
    return answer("", choices=[{**choice, **more}], usage=usage)


def deltas(*given: dict[str, Any], finish: str = "stop") -> Any:
    events = [chunk([{"index": 0, "delta": {"role": "assistant", "content": ""}}], prompt_token_ids=[5, 6, 7])]
    for number, delta in enumerate(given):
        one = {"index": 0, "delta": delta, "token_ids": [number], "logprobs": logprobs_of([number])}
        events.append(chunk([{**one, "finish_reason": None}]))
    events.append(chunk([{"index": 0, "delta": {}, "finish_reason": finish, "token_ids": []}]))
    usage = {"prompt_tokens": 3, "completion_tokens": len(given), "total_tokens": 3 + len(given)}
    return sse([*events, chunk([], usage=usage), b"[DONE]"])


def read(memory: Memory | None = None, owner: str = "me", **body: Any) -> dict[str, Any]:
    return chat_request({"model": "m", **body}, memory or Memory(), owner)[0]


# what is asked


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ("Hi", [{"role": "user", "content": "Hi"}]),
        ([{"role": "developer", "content": "Be short."}], [{"role": "system", "content": "Be short."}]),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}],
            [{"role": "user", "content": "a\nb"}],
        ),
        (
            [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA"}]}],
            [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}],
                }
            ],
        ),
        (
            [
                {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "hm"}],
                },
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
                {"type": "function_call", "call_id": "c1", "name": "look_up", "arguments": "{}"},
                {"type": "function_call", "call_id": "c2", "name": "look_up", "arguments": '{"city": "Rome"}'},
                {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
                {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "wet"}]},
                {"role": "assistant", "content": "Sunny, and wet."},
                {"role": "assistant", "content": "Anything else?"},
            ],
            [
                called(("c1", "{}"), ("c2", '{"city": "Rome"}'), text="Let me see.", reasoning="hm"),
                {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
                {"role": "tool", "tool_call_id": "c2", "content": "wet"},
                {"role": "assistant", "content": "Sunny, and wet."},
                {"role": "assistant", "content": "Anything else?"},
            ],
        ),
    ],
)
def test_items_become_messages(given: Any, messages: list[Any]) -> None:
    assert read(input=given)["messages"] == messages


def test_thoughts_in_pieces_are_one_turn_s() -> None:
    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}

    call = {"type": "function_call", "call_id": "c1", "name": "look_up", "arguments": "{}"}
    said = read(input=[thought("a"), thought("b"), thought(""), call, thought(""), {**call, "call_id": "c2"}])[
        "messages"
    ]
    assert said == [called(("c1", "{}"), ("c2", "{}"), reasoning="ab")]


ODD: list[dict[str, Any]] = [
    {"input": [{"role": "user", "content": [{"type": [], "text": "x"}]}]},
    {"input": [{"role": [], "content": "x"}]},
    {"input": [{"type": {}, "role": "user"}]},
    {"input": [{"type": "reasoning", "content": 5}]},
    {"input": [{"type": "reasoning", "content": [{"text": ["a"]}]}]},
    {"input": [{"type": "reasoning", "summary": [{"text": 5}, 7]}]},
    {"input": [{"type": "item_reference", "id": []}]},
    {"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "tools": [{"name": []}]}},
    {"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "tools": 5}},
    {"tools": [FUNCTION], "tool_choice": {"type": []}},
    {"tools": [5]},
    {"tools": [{**FUNCTION, "name": []}]},
    {"text": 5},
    {"text": {"format": 5}},
    {"text": {"format": {"type": []}}},
    {"reasoning": 5},
    {"include": 5},
    {"previous_response_id": []},
    {"stream": "yes"},
]


@pytest.mark.parametrize("odd", ODD)
async def test_no_odd_request_is_the_server_s_fault(w: World, odd: dict[str, Any]) -> None:
    reply = await w.http.post("/v1/responses", json={"model": "m", "input": "x", **odd})
    assert reply.status_code in (200, 400, 404), reply.text
    assert (
        await w.http.post("/v1/responses/input_tokens", json={"model": "m", "input": "x", **odd})
    ).status_code != 500


def test_fields_take_chat_s_names_and_unknown_ones_pass() -> None:
    chat = read(
        input="Hi",
        instructions="Be short.",
        max_output_tokens=7,
        temperature=0.5,
        tools=[FUNCTION],
        tool_choice={"type": "function", "name": "look_up"},
        text={"format": {"type": "json_schema", "name": "city", "schema": {"type": "object"}, "strict": True}},
        reasoning={"effort": "low", "summary": "auto"},
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        stream=True,
        metadata={"k": "v"},
        store=False,
        truncation="auto",
        chat_template_kwargs={"enable_thinking": False},
        a_new_field=1,
    )
    function = {key: value for key, value in FUNCTION.items() if key != "type"}
    assert chat == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}],
        "max_completion_tokens": 7,
        "temperature": 0.5,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "look_up"}},
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "city", "schema": {"type": "object"}, "strict": True},
        },
        "reasoning_effort": "low",
        "logprobs": True,
        "top_logprobs": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"enable_thinking": False},
        "a_new_field": 1,
    }


def test_allowed_tools_are_those_that_are_sent() -> None:
    other = {**FUNCTION, "name": "other"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "other"}]}
    chat = read(input="Hi", tools=[FUNCTION, other], tool_choice=allowed)
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["other"]
    assert chat["tool_choice"] == "required"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\].*'web_search' runs on OpenAI's servers"),
        ({"conversation": "conv_1"}, "conversation lives on OpenAI's servers"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt lives on OpenAI's servers"),
        ({"background": True}, "background"),
        ({"n": 2}, "one answer"),
        ({"input": [{"type": "computer_call"}]}, r"input\[0\].*'computer_call'"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, r"input\[0\].*input_file"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, r"input\[0\].*call_id"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, r"input\[0\].*name and arguments"),
        ({"input": [{"role": "wizard", "content": "x"}]}, r"input\[0\].*role"),
        ({"input": 3}, "input must be"),
        ({"input": [3]}, r"input\[0\] must be an object"),
        ({"text": {"format": {"type": "grammar"}}}, "grammar"),
        ({"tool_choice": {"type": "file_search"}}, "file_search"),
        ({"previous_response_id": "resp_1"}, "no response 'resp_1' to go on from"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "no item 'msg_1'"),
        ({"instructions": ["x"]}, "instructions must be a text"),
    ],
)
def test_what_cannot_be_a_chat_completion_is_refused_by_name(body: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequestError, match=said):
        read(**{"input": "Hi", **body})


# what is answered


async def test_a_response_and_its_record(w: World) -> None:
    w.engine.script.append(whole({"role": "assistant", "content": "Sunny.", "reasoning": "hm"}))
    got = await w.sdk().responses.create(
        model="gpt-5", input="How is it?", instructions="Be short.", metadata={"k": "v"}
    )
    assert (got.output_text, got.status, got.model) == ("Sunny.", "completed", "gpt-5")
    assert [item.type for item in got.output] == ["reasoning", "message"]
    assert got.output[0].content[0].text == "hm"
    assert (got.instructions, got.metadata) == ("Be short.", {"k": "v"})
    assert (got.usage.input_tokens, got.usage.output_tokens, got.usage.total_tokens) == (3, 2, 5)
    call = w.store.only
    assert (call.status, call.capture, call.choices[0].token_ids) == (CallStatus.OK, CaptureLevel.TOKENS, ids_of("x"))
    assert call.request["messages"] == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "How is it?"},
    ]


async def test_a_tool_loop_goes_on_from_items_and_from_the_id_alike(w: World) -> None:
    sdk = w.sdk()
    w.engine.script += [whole(called(("c1", '{"city": "Rome"}')), "tool_calls"), answer("Sunny."), answer("Bye.")]
    first = await sdk.responses.create(model="m", input="How is Rome?", tools=[FUNCTION])
    (call,) = first.output
    assert (call.type, call.name) == ("function_call", "look_up")
    assert (call.call_id, call.arguments) == ("c1", '{"city": "Rome"}')
    output = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
    await sdk.responses.create(
        model="m", input=[{"role": "user", "content": "How is Rome?"}, call.to_dict(), output], tools=[FUNCTION]
    )
    second = await sdk.responses.create(model="m", previous_response_id=first.id, input=[output], tools=[FUNCTION])
    assert second.previous_response_id == first.id
    _, by_items, by_id = (asked.body["messages"] for asked in w.engine.chats)
    assert by_items == by_id
    assert by_id[1:] == [
        called(("c1", '{"city": "Rome"}')),
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]


@pytest.mark.parametrize(("finish", "reason"), [("length", "max_output_tokens"), ("content_filter", "content_filter")])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_cut_short_is_incomplete(w: World, finish: str, reason: str, stream: bool) -> None:
    if stream:
        w.engine.script.append(deltas({"content": "Su"}, finish=finish))
        events = [e async for e in await w.sdk().responses.create(model="m", input="x", stream=True)]
        assert events[-1].type == "response.incomplete"
        got = events[-1].response
    else:
        w.engine.script.append(whole({"role": "assistant", "content": "Su"}, finish))
        got = await w.sdk().responses.create(model="m", input="x")
    assert (got.status, got.incomplete_details.reason, got.output[0].status) == ("incomplete", reason, "incomplete")


async def test_logprobs_are_told_where_they_are_asked_for(w: World) -> None:
    got = await w.sdk().responses.create(model="m", input="x", include=["message.output_text.logprobs"])
    assert [entry.logprob for entry in got.output[0].content[0].logprobs] == [-0.25] * 3
    silent = await w.sdk().responses.create(model="m", input="x")
    assert silent.output[0].content[0].logprobs == []


async def test_structured_output_is_parsed_by_the_sdk(w: World) -> None:
    class City(BaseModel):
        name: str

    w.engine.script.append(answer('{"name": "Rome"}'))
    got = await w.sdk().responses.parse(model="m", input="Where?", text_format=City)
    assert got.output_parsed == City(name="Rome")
    assert w.engine.chats[0].body["response_format"]["json_schema"]["schema"]["required"] == ["name"]


async def test_a_stream_s_events_come_in_order_and_the_sdk_puts_them_together(w: World) -> None:
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "look_up", "arguments": ""}}
    other = {"index": 1, "id": "c2", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
    more = {"index": 0, "function": {"arguments": '{"city": "Rome"}'}}
    w.engine.script.append(
        deltas(
            {"reasoning": "h"},
            {"reasoning": "m"},
            {"content": "Let me "},
            {"content": "see."},
            {"tool_calls": [call]},
            {"tool_calls": [other]},
            {"tool_calls": [more]},
            finish="tool_calls",
        )
    )
    async with w.sdk().responses.stream(model="m", input="How is Rome?", tools=[FUNCTION]) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type.removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    assert final.output_text == "Let me see."
    assert [item.arguments for item in final.output[2:]] == ['{"city": "Rome"}', "{}"]
    assert final.usage.output_tokens == 7
    assert w.store.only.capture is CaptureLevel.TOKENS


async def test_text_behind_calls_is_a_message_of_its_own_and_one_turn_when_sent_again(w: World) -> None:
    call = {"index": 0, "id": "c1", "function": {"name": "look_up", "arguments": "{}"}}
    w.engine.script.append(deltas({"content": "a"}, {"tool_calls": [call]}, {"content": "b"}))
    async with w.sdk().responses.stream(model="m", input="x") as stream:
        final = await stream.get_final_response()
    assert [item.type for item in final.output] == ["message", "function_call", "message"]
    chat = read(input=[item.to_dict() for item in final.output])
    assert chat["messages"] == [called(("c1", "{}"), text="ab")]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal(w: World, stream: bool) -> None:
    told = {"role": "assistant", "content": None, "refusal": "I cannot."}
    w.engine.script.append(deltas(told) if stream else whole(told))
    if stream:
        async with w.sdk().responses.stream(model="m", input="x") as answered:
            got = await answered.get_final_response()
    else:
        got = await w.sdk().responses.create(model="m", input="x")
    assert (got.output[0].content[0].type, got.output[0].content[0].refusal) == ("refusal", "I cannot.")


async def told(w: World) -> tuple[list[Any], Exception | None]:
    """The events of a stream, and what the SDK raised."""
    seen: list[Any] = []
    try:
        async for event in await w.sdk().responses.create(model="m", input="x", stream=True):
            seen.append(event)
    except openai.APIError as error:
        return seen, error
    return seen, None


async def test_an_error_inside_a_stream_fails_the_response_and_raises(w: World) -> None:
    begun = chunk([{"index": 0, "delta": {"content": "Su"}, "finish_reason": None, "token_ids": [1]}])
    w.engine.script.append(sse([begun, b'{"error": {"message": "out of memory", "code": 500}}', b"[DONE]"]))
    seen, failure = await told(w)
    assert isinstance(failure, openai.APIError)
    assert "out of memory" in str(failure)
    assert (seen[-1].type, seen[-1].response.status) == ("response.failed", "failed")
    assert seen[-1].response.error.message == "out of memory"
    w.engine.script.append(sse([b'{"error": {"message": "out of memory", "code": 500}}', b"[DONE]"]))
    raw = await w.http.post("/v1/responses", json={"model": "m", "input": "x", "stream": True})
    assert '"type":"error"' in raw.text
    assert '"code":"500"' in raw.text, "a text, as clients that check it expect"
    assert w.store.all[0].status is CallStatus.ERROR


async def test_a_stream_that_breaks_off_is_no_response(w: World) -> None:
    begun = chunk([{"index": 0, "delta": {"content": "Su"}, "finish_reason": None, "token_ids": [1]}])
    w.engine.script.append(sse([begun], cut=True))
    seen, failure = await told(w)
    assert isinstance(failure, openai.APIError)
    assert seen[-1].type == "response.failed"
    assert w.store.only.status is CallStatus.ERROR


async def test_an_engine_s_refusal_and_the_proxy_s_have_the_envelope(w: World) -> None:
    w.engine.script.append(status(429, {"error": {"message": "slow down", "code": "busy"}}))
    with pytest.raises(openai.RateLimitError, match="slow down"):
        await w.sdk().responses.create(model="m", input="x")
    with pytest.raises(openai.BadRequestError, match="conversation lives") as refused:
        await w.sdk().responses.create(model="m", input="x", conversation="conv_1")
    assert refused.value.param == "conversation"


async def test_remembered_responses_are_their_owner_s_alone(w: World) -> None:
    mine, other = w.sdk(), w.sdk("eval")
    kept = await mine.responses.create(model="m", input="x")
    unkept = await mine.responses.create(model="m", input="x", store=False)
    assert (await mine.responses.retrieve(kept.id)).output_text == "Hi"
    for sdk, name in ((other, kept.id), (mine, unkept.id)):
        with pytest.raises(openai.NotFoundError, match="in memory"):
            await sdk.responses.retrieve(name)
        with pytest.raises(openai.NotFoundError, match="to go on from"):
            await sdk.responses.create(model="m", input="y", previous_response_id=name)
    with pytest.raises(openai.NotFoundError):
        await other.responses.delete(kept.id)
    await mine.responses.delete(kept.id)
    last = await mine.responses.create(model="m", input="x")
    w.context.closed = True
    w.proxy.forget(w.context.id)
    with pytest.raises(openai.NotFoundError):
        await mine.responses.retrieve(last.id)
    with pytest.raises(openai.NotFoundError):
        await mine.responses.retrieve(kept.id)


def test_the_memory_is_bounded_in_number_size_and_time() -> None:
    now = 0.0

    def keep(memory: Memory, name: str, text: str = "x") -> None:
        memory.keeper("me", [])({"id": name, "output": []}, {"role": "assistant", "content": text})

    def known(memory: Memory) -> list[str]:
        return [name for name in "abc" if memory.response("me", name) is not None]

    clock: Callable[[], float] = lambda: now  # noqa: E731
    few = Memory(responses=2, seconds=10, clock=clock)
    for name in "abc":
        keep(few, name)
        now += 1
    assert known(few) == ["b", "c"]
    now = 11.5
    assert known(few) == ["c"]
    small = Memory(size=400, clock=clock)
    for name in "abc":
        keep(small, name, "x" * 100)
    assert known(small) == ["b", "c"]
    keep(small, "d", "x" * 1000)
    assert known(small) == []
    assert small.response("me", "d") is None, "one that is larger than the memory is not kept"


async def test_an_item_can_be_named_instead_of_sent(w: World) -> None:
    w.engine.script.append(whole(called(("c1", "{}")), "tool_calls"))
    sdk = w.sdk()
    first = await sdk.responses.create(model="m", input="x")
    output = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
    named = {"type": "item_reference", "id": first.output[0].id}
    await sdk.responses.create(model="m", input=[{"role": "user", "content": "x"}, named, output])
    assert w.engine.chats[1].body["messages"][1] == called(("c1", "{}"))
