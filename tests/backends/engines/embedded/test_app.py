"""The routes as a client sees them, through the real openai SDK where it has a word for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import openai
import orjson
import pytest
from art_backends.engines.embedded import replies
from art_backends.engines.embedded.app import create_app
from art_backends.errors import AdapterError, EngineError, TemplateError

HI: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
IDS = {"return_token_ids": True}


async def stream(http: httpx2.AsyncClient, path: str = "/v1/chat/completions", **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, [DONE] checked and taken off."""
    reply = await http.post(path, json={"stream": True, **body})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = reply.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


async def refused(http: httpx2.AsyncClient, path: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    reply = await http.post(path, json=body)
    assert reply.status_code >= 400, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return {"status": reply.status_code, **error}


class TestChat:
    async def test_a_plain_answer(self, sdk: openai.AsyncOpenAI, say: Any, scripted: Any, tokenizer: Any) -> None:
        ids = say("hello world")
        reply = await sdk.chat.completions.create(model="base", messages=HI, extra_body=IDS)
        choice = reply.choices[0]
        assert (choice.message.role, choice.message.content, choice.message.tool_calls) == (
            "assistant",
            "hello world",
            None,
        )
        assert (choice.finish_reason, choice.logprobs, reply.object) == ("stop", None, "chat.completion")
        prompt = tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
        assert reply.prompt_token_ids == prompt  # type: ignore[attr-defined]
        assert choice.token_ids == ids  # type: ignore[attr-defined]
        assert choice.stop_reason is None  # type: ignore[attr-defined]
        assert reply.usage is not None
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(prompt), len(ids))
        assert reply.usage.total_tokens == len(prompt) + len(ids)
        row = scripted.seen[0]
        assert (list(row.prompt_ids), row.adapter, row.temperature, row.top_p, row.top_k, row.seed) == (
            prompt,
            None,
            1.0,
            1.0,
            0,
            None,
        )
        assert row.max_tokens == scripted.max_model_len - len(prompt)
        assert row.stop_token_ids == {tokenizer.eos_token_id}

    async def test_ids_only_when_asked(self, http: httpx2.AsyncClient, say: Any) -> None:
        say("x")
        reply = (await http.post("/v1/chat/completions", json={"model": "base", "messages": HI})).json()
        assert "prompt_token_ids" not in reply
        assert "token_ids" not in reply["choices"][0]

    async def test_sampling_goes_to_the_engine(self, http: httpx2.AsyncClient, say: Any, scripted: Any) -> None:
        for _ in range(2):
            say("x")
        body = {"temperature": 0, "top_p": 0.5, "top_k": -1, "seed": 7, "n": 2, "max_tokens": 9}
        body |= {"max_completion_tokens": 5, "stop_token_ids": [3], "ignore_eos": True, "unknown_field": 1}
        assert (
            await http.post("/v1/chat/completions", json={"model": "policy@1", "messages": HI, **body})
        ).status_code == 200
        first, second = scripted.seen
        assert (first.adapter, first.temperature, first.top_p, first.top_k) == ("policy@1", 0.0, 0.5, 0)
        assert (first.max_tokens, first.stop_token_ids) == (5, {3})
        assert (first.seed, second.seed) == (7, 8)

    async def test_logprobs(self, sdk: openai.AsyncOpenAI, say: Any) -> None:
        ids = say("€")
        reply = await sdk.chat.completions.create(model="base", messages=HI, logprobs=True, top_logprobs=2)
        logprobs = reply.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert [entry.logprob for entry in logprobs.content] == [-0.5] * len(ids)
        assert bytes(byte for entry in logprobs.content[:-1] for byte in entry.bytes or ()) == "€".encode()
        assert logprobs.content[-1].token == "<|im_end|>"
        assert [top.logprob for top in logprobs.content[0].top_logprobs] == [-0.5, -1.5]

    async def test_logprobs_by_token_id_and_without_alternatives(self, http: httpx2.AsyncClient, say: Any) -> None:
        ids = say("hello")
        body = {"messages": HI, "logprobs": True, "top_logprobs": 0, "return_tokens_as_token_ids": True}
        reply = (await http.post("/v1/chat/completions", json=body)).json()
        content = reply["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in content] == [f"token_id:{index}" for index in ids]
        assert [entry["top_logprobs"] for entry in content] == [[]] * len(ids)

    async def test_choices_of_n(self, sdk: openai.AsyncOpenAI, say: Any) -> None:
        said = [say(text) for text in ("one", "two", "three")]
        reply = await sdk.chat.completions.create(model="base", messages=HI, n=3, extra_body=IDS)
        assert [(choice.index, choice.message.content) for choice in reply.choices] == [
            (0, "one"),
            (1, "two"),
            (2, "three"),
        ]
        assert [choice.token_ids for choice in reply.choices] == said  # type: ignore[attr-defined]
        assert reply.usage is not None
        assert reply.usage.completion_tokens == sum(map(len, said))

    async def test_length(self, sdk: openai.AsyncOpenAI, say: Any) -> None:
        say("abcdef")
        reply = await sdk.chat.completions.create(model="base", messages=HI, max_tokens=3)
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("abc", "length")

    async def test_a_stop_string_across_tokens(self, http: httpx2.AsyncClient, say: Any, scripted: Any) -> None:
        ids = say("one END two", end=False)
        body = {"messages": HI, "stop": ["END", "zz"], **IDS}
        choice = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]
        assert choice["message"]["content"] == "one "
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "END")
        assert choice["token_ids"] == ids[: len(ids) - 4], "what was sampled stays, to the token that completed it"
        assert scripted.cancelled == 1, "the row does not go on"

    async def test_a_stop_token_that_was_named(self, http: httpx2.AsyncClient, say: Any, tokenizer: Any) -> None:
        ids = say("abc", end=False)
        body = {"messages": HI, "stop_token_ids": [ids[1]], **IDS}
        choice = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]
        assert (choice["message"]["content"], choice["stop_reason"], choice["token_ids"]) == ("a", ids[1], ids[:2])

    async def test_exact_prompts(self, http: httpx2.AsyncClient, say: Any, scripted: Any) -> None:
        say(CALL)
        body = {"messages": HI, "tools": TOOLS, "kv_transfer_params": {"prompt_token_ids": [5, 6, 7]}, **IDS}
        reply = (await http.post("/v1/chat/completions", json=body)).json()
        assert reply["prompt_token_ids"] == [5, 6, 7]
        assert scripted.seen[0].prompt_ids == (5, 6, 7)
        assert reply["choices"][0]["finish_reason"] == "tool_calls"

    @pytest.mark.parametrize("ids", [[], "x", [1.5], [-1], [10**6], [True], None, [[1]]])
    async def test_exact_prompts_that_are_none(self, http: httpx2.AsyncClient, ids: Any) -> None:
        error = await refused(http, messages=HI, kv_transfer_params={"prompt_token_ids": ids})
        assert (error["status"], error["param"]) == (400, "kv_transfer_params.prompt_token_ids")


class TestTools:
    async def test_parallel_calls(self, sdk: openai.AsyncOpenAI, say: Any) -> None:
        say(f"Let me see.\n{CALL}\n{CALL}")
        reply = await sdk.chat.completions.create(model="base", messages=HI, tools=TOOLS)
        message = reply.choices[0].message
        assert (message.content, reply.choices[0].finish_reason) == ("Let me see.", "tool_calls")
        assert message.tool_calls is not None
        assert [(call.type, call.function.name, call.function.arguments) for call in message.tool_calls] == [
            ("function", "add", '{"a": 1}')
        ] * 2
        assert len({call.id for call in message.tool_calls}) == 2

    async def test_the_answer_can_be_sent_back(self, sdk: openai.AsyncOpenAI, say: Any, scripted: Any) -> None:
        say(CALL)
        say("done")
        reply = await sdk.chat.completions.create(model="base", messages=HI, tools=TOOLS)
        message = reply.choices[0].message
        assert message.tool_calls is not None
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "1"}
        history: Any = [*HI, message, result]
        assert (await sdk.chat.completions.create(model="base", messages=history, tools=TOOLS)).choices[
            0
        ].message.content == "done"
        assert len(scripted.seen[1].prompt_ids) > len(scripted.seen[0].prompt_ids)

    async def test_only_one_call_where_parallel_calls_are_off(self, sdk: openai.AsyncOpenAI, say: Any) -> None:
        say(CALL + CALL)
        reply = await sdk.chat.completions.create(model="base", messages=HI, tools=TOOLS, parallel_tool_calls=False)
        assert len(reply.choices[0].message.tool_calls or ()) == 1

    async def test_no_parsing_without_tools_or_with_choice_none(self, sdk: openai.AsyncOpenAI, say: Any) -> None:
        for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            say(CALL)
            reply = await sdk.chat.completions.create(model="base", messages=HI, **options)
            assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (CALL, "stop")

    async def test_a_cut_call_is_content_and_length(self, sdk: openai.AsyncOpenAI, say: Any) -> None:
        ids = say(CALL)
        reply = await sdk.chat.completions.create(model="base", messages=HI, tools=TOOLS, max_tokens=len(ids) - 20)
        assert reply.choices[0].finish_reason == "length"
        assert reply.choices[0].message.tool_calls is None
        content = reply.choices[0].message.content
        assert content
        assert CALL.startswith(content)

    async def test_forced_tools_are_constrained(self, http: httpx2.AsyncClient, say: Any, scripted: Any) -> None:
        for choice in ("required", {"type": "function", "function": {"name": "add"}}):
            say(CALL)
            body = {"messages": HI, "tools": TOOLS, "tool_choice": choice}
            reply = (await http.post("/v1/chat/completions", json=body)).json()
            assert reply["choices"][0]["finish_reason"] == "tool_calls"
            assert reply["choices"][0]["message"]["content"] is None
            assert scripted.seen.pop().mask is not None


class TestStream:
    async def test_shapes(self, http: httpx2.AsyncClient, say: Any, tokenizer: Any) -> None:
        ids = say("hey €")
        events = await stream(http, messages=HI, logprobs=True, top_logprobs=0, **IDS)
        first, rest = events[0], events[1:]
        assert first["object"] == "chat.completion.chunk"
        assert first["prompt_token_ids"][:1] == [tokenizer.convert_tokens_to_ids("<|im_start|>")]
        assert first["choices"] == [
            {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        ]
        assert len({event["id"] for event in events}) == 1
        choices = [event["choices"][0] for event in rest]
        assert [choice["token_ids"] for choice in choices] == [[index] for index in ids]
        assert [len(choice["logprobs"]["content"]) for choice in choices] == [1] * len(ids)
        assert "".join(choice["delta"].get("content", "") for choice in choices) == "hey €"
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(ids) - 1) + ["stop"]
        assert choices[-1]["delta"] == {}
        assert choices[-1]["stop_reason"] is None
        assert not any("usage" in event for event in events)

    async def test_usage_only_when_asked(self, sdk: openai.AsyncOpenAI, say: Any) -> None:
        ids = say("hi")
        chunks = [
            chunk
            async for chunk in await sdk.chat.completions.create(
                model="base", messages=HI, stream=True, stream_options={"include_usage": True}
            )
        ]
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == len(ids)

    async def test_a_stream_reads_as_the_whole(self, sdk: openai.AsyncOpenAI, say: Any) -> None:
        """The SDK's own accumulator puts the chunks of two choices together, tool calls included."""
        texts = [f"See:\n{CALL}\n{CALL}", "no call <tool_call>{oops</tool_call>"]
        for text in [*texts, *texts]:
            say(text)
        whole = await sdk.chat.completions.create(model="base", messages=HI, tools=TOOLS, n=2, logprobs=True)
        async with sdk.chat.completions.stream(model="base", messages=HI, tools=TOOLS, n=2, logprobs=True) as chunks:
            final = await chunks.get_final_completion()
        for left, right in zip(whole.choices, final.choices, strict=True):
            assert left.finish_reason == right.finish_reason
            assert (left.message.content or "") == (right.message.content or "")
            functions = [
                [call.function.model_dump() for call in side.message.tool_calls or ()] for side in (left, right)
            ]
            assert [(item["name"], item["arguments"]) for item in functions[0]] == [
                (item["name"], item["arguments"]) for item in functions[1]
            ]
            assert left.logprobs is not None
            assert right.logprobs is not None
            assert left.logprobs.content == right.logprobs.content

    async def test_deltas_of_calls(self, http: httpx2.AsyncClient, say: Any) -> None:
        ids = say(f"{CALL}\n{CALL}")
        events = await stream(http, messages=HI, tools=TOOLS, **IDS)
        choices = [event["choices"][0] for event in events[1:]]
        assert [index for choice in choices for index in choice.get("token_ids", [])] == ids
        deltas = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
        assert [(delta["index"], "id" in delta, delta["function"].get("name")) for delta in deltas] == [
            (0, True, "add"),
            (0, False, None),
            (1, True, "add"),
            (1, False, None),
        ]
        assert all(len(choice["delta"].get("tool_calls", ())) <= 1 for choice in choices)
        swallowed = [choice for choice in choices if choice["delta"] == {}]
        assert swallowed
        assert all(choice["token_ids"] for choice in swallowed)
        assert choices[-1]["finish_reason"] == "tool_calls"

    async def test_a_call_that_ends_with_the_answer(self, http: httpx2.AsyncClient, say: Any) -> None:
        ids = say(CALL, end=False)
        choices = [event["choices"][0] for event in (await stream(http, messages=HI, tools=TOOLS, **IDS))[1:]]
        assert [index for choice in choices for index in choice.get("token_ids", [])] == ids
        assert [choice["finish_reason"] for choice in choices][-2:] == [None, "tool_calls"]

    async def test_a_stop_string(self, http: httpx2.AsyncClient, say: Any) -> None:
        say("one END two")
        choices = [event["choices"][0] for event in (await stream(http, messages=HI, stop="END"))[1:]]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == "one "
        assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "END")


class TestFaults:
    @pytest.mark.parametrize("end", ["error", "abort", "vanish"])
    async def test_an_answer_that_breaks_off_is_an_error(
        self, http: httpx2.AsyncClient, scripted: Any, end: str
    ) -> None:
        scripted.answers += [[70, 71, end]] * 2
        error = await refused(http, messages=HI)
        assert (error["status"], error["type"]) == (503 if end == "abort" else 500, "server_error")
        events = await stream(http, messages=HI)
        assert "choices" in events[1]
        assert events[-1]["error"]["message"] == error["message"]

    async def test_an_error_before_the_first_token_is_an_http_error(
        self, http: httpx2.AsyncClient, scripted: Any
    ) -> None:
        overloaded = EngineError("too many requests are waiting", 503, "engine_overloaded")
        scripted.answers += [[overloaded], [overloaded]]
        for streaming in (False, True):
            error = await refused(http, messages=HI, stream=streaming)
            assert (error["status"], error["code"]) == (503, "engine_overloaded")

    async def test_one_broken_row_ends_the_others(self, http: httpx2.AsyncClient, scripted: Any) -> None:
        scripted.answers += [[70, "hold"], [71, "error"]]
        assert (await refused(http, messages=HI, n=2))["status"] == 500
        assert scripted.cancelled == 2

    async def test_an_unforeseen_error_keeps_its_details(
        self, http: httpx2.AsyncClient, scripted: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        scripted.answers.append([ZeroDivisionError("secret")])
        error = await refused(http, messages=HI)
        assert error["status"] == 500
        assert "secret" not in error["message"]
        assert "secret" in caplog.text

    @pytest.mark.parametrize("streaming", [False, True])
    async def test_a_client_that_leaves_cancels_its_rows(self, app: Any, scripted: Any, streaming: bool) -> None:
        scripted.answers += [[70, "hold"], [70, "hold"], [70, "hold"]]
        body = orjson.dumps({"messages": HI, "n": 3, "stream": streaming})
        sent: list[Any] = []
        incoming = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if incoming:
                return incoming.pop()
            await scripted.waiting.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "query_string": b""}
        async with asyncio.timeout(10):
            await app(scope, receive, send)
        assert scripted.cancelled == len(scripted.seen) == 3
        assert bool(sent) is streaming
        assert not any(message.get("more_body") is False for message in sent)


class TestRefusals:
    @pytest.mark.parametrize(
        ("body", "param", "words"),
        [
            ({}, "messages", "Field required"),
            ({"messages": []}, "messages", "at least 1 item"),
            ({"messages": "hi"}, "messages", "list"),
            ({"messages": [3]}, "messages", "dictionary"),
            ({"messages": [{"role": "user", "content": 3}]}, "messages", "content must be"),
            ({"messages": [{"role": "robot", "content": ""}]}, "messages", "Unknown message role"),
            ({"n": 0}, "n", "greater than or equal to 1"),
            ({"n": 129}, "n", "less than or equal to 128"),
            ({"n": "2"}, "n", "integer"),
            ({"n": True}, "n", "integer"),
            ({"temperature": -1}, "temperature", "greater"),
            ({"temperature": "hot"}, "temperature", "number"),
            ({"top_p": 0}, "top_p", "greater"),
            ({"top_k": -2}, "top_k", "greater"),
            ({"max_tokens": 0}, "max_tokens", "greater"),
            ({"max_completion_tokens": 1.5}, "max_completion_tokens", "integer"),
            ({"seed": 2**63}, "seed", "less"),
            ({"seed": 10**30}, "seed", "integer"),
            ({"stop": ""}, None, "empty string"),
            ({"stop": ["x"] * 17}, None, "at most 16"),
            ({"stop": [3]}, "stop", "string"),
            ({"tools": []}, None, "empty list"),
            ({"tools": [{"type": "function"}]}, "tools", "required"),
            ({"tools": [{"type": "web_search"}]}, "tools", "function"),
            ({"tool_choice": "auto"}, None, "when tools are given"),
            ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice", "'none', 'auto' or 'required'"),
            ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, None, "not among"),
            ({"top_logprobs": 3}, None, "logprobs: true"),
            ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less"),
            ({"stream_options": {"include_usage": True}}, None, "stream: true"),
            ({"response_format": {"type": "xml"}}, "response_format", "json_object"),
            ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema.schema"),
            ({"frequency_penalty": 0.5}, None, "frequency_penalty is not supported"),
            ({"logit_bias": {"5": 1}}, None, "logit_bias is not supported"),
            ({"chat_template": "x"}, None, "chat_template is not supported"),
            ({"chat_template_kwargs": {"tokenize": True}}, "messages", "may not set tokenize"),
            ({"continue_final_message": True}, None, "add_generation_prompt: false"),
            ({"kv_transfer_params": 3}, "kv_transfer_params", "dictionary"),
        ],
    )
    async def test_bodies(self, http: httpx2.AsyncClient, body: dict[str, Any], param: str | None, words: str) -> None:
        defaults = {} if not body else {"messages": HI}
        error = await refused(http, **{**defaults, **body})
        assert (error["status"], error["type"], error["param"]) == (400, "invalid_request_error", param)
        assert words in error["message"]

    async def test_neutral_values_of_what_is_not_supported(self, http: httpx2.AsyncClient, say: Any) -> None:
        say("x")
        neutral = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "functions": None, "min_p": 0}
        assert (await http.post("/v1/chat/completions", json={"messages": HI, **neutral})).status_code == 200

    @pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b'{"messages": NaN}', b"\xff", b"[" * 5000])
    async def test_what_is_no_json_object(self, http: httpx2.AsyncClient, body: bytes) -> None:
        reply = await http.post("/v1/chat/completions", content=body)
        assert reply.status_code == 400
        assert "JSON" in reply.json()["error"]["message"]

    async def test_a_body_that_is_too_large(self, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(replies, "MAX_BODY_BYTES", 100)
        reply = await http.post("/v1/chat/completions", content=b" " * 101)
        assert (reply.status_code, reply.json()["error"]["type"]) == (413, "invalid_request_error")

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
    async def test_an_unknown_model(self, sdk: openai.AsyncOpenAI, http: httpx2.AsyncClient, path: str) -> None:
        error = await refused(http, path, model="policy@9", messages=HI, prompt="x")
        assert (error["status"], error["code"], error["param"]) == (404, "model_not_found", "model")
        assert error["message"] == "The model `policy@9` does not exist."
        with pytest.raises(openai.NotFoundError):
            await sdk.chat.completions.create(model="policy@9", messages=HI)

    async def test_the_context_in_openais_words(self, sdk: openai.AsyncOpenAI, http: httpx2.AsyncClient) -> None:
        long = {"kv_transfer_params": {"prompt_token_ids": [5] * 510}, "messages": HI}
        error = await refused(http, **long, max_tokens=3)
        assert error == {
            "status": 400,
            "message": "This model's maximum context length is 512 tokens. However, you requested 513 tokens "
            "(510 in the messages, 3 in the completion). Please reduce the length of the messages or completion.",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
        }
        full = {"kv_transfer_params": {"prompt_token_ids": [5] * 512}, "messages": HI}
        assert (await refused(http, **full))["message"] == (
            "This model's maximum context length is 512 tokens. However, your messages resulted in 512 tokens. "
            "Please reduce the length of the messages."
        )
        assert (await refused(http, "/v1/completions", prompt=[5] * 500))["message"] == (
            "This model's maximum context length is 512 tokens. However, you requested 516 tokens "
            "(500 in your prompt; 16 for the completion). Please reduce your prompt; or completion length."
        )
        with pytest.raises(openai.BadRequestError) as caught:
            await sdk.chat.completions.create(model="base", messages=[{"role": "user", "content": "x" * 600}])
        assert caught.value.code == "context_length_exceeded"

    async def test_routes_that_are_not_there(self, http: httpx2.AsyncClient) -> None:
        reply = await http.get("/nowhere")
        assert (reply.status_code, reply.json()["error"]["message"]) == (404, "GET /nowhere: there is no such route")
        reply = await http.get("/v1/chat/completions")
        assert (reply.status_code, reply.headers["allow"]) == (405, "POST")


class TestCompletions:
    async def test_prompts_of_every_kind(
        self, sdk: openai.AsyncOpenAI, say: Any, scripted: Any, tokenizer: Any
    ) -> None:
        hi = tokenizer.encode("hi")
        kinds: list[tuple[Any, list[list[int]]]] = [
            ("hi", [hi]),
            ([1, 2], [[1, 2]]),
            (["hi", "x"], [hi, tokenizer.encode("x")]),
            ([[1], [2, 3]], [[1], [2, 3]]),
        ]
        for prompt, rows in kinds:
            scripted.seen.clear()
            said = [say(f"a{index}") for index in range(2 * len(rows))]
            reply = await sdk.completions.create(model="base", prompt=prompt, n=2, max_tokens=9, extra_body=IDS)
            assert [list(row.prompt_ids) for row in scripted.seen] == [row for row in rows for _ in range(2)]
            assert [choice.text for choice in reply.choices] == [f"a{index}" for index in range(2 * len(rows))]
            assert [choice.token_ids for choice in reply.choices] == said  # type: ignore[attr-defined]
            assert reply.choices[-1].prompt_token_ids == rows[-1]  # type: ignore[attr-defined]
            assert reply.usage is not None
            assert reply.usage.prompt_tokens == sum(map(len, rows))

    async def test_defaults_logprobs_and_stop(self, sdk: openai.AsyncOpenAI, say: Any, scripted: Any) -> None:
        say("ab!c")
        reply = await sdk.completions.create(model="base", prompt="x", logprobs=1, stop="!")
        assert scripted.seen[0].max_tokens == 16
        choice = reply.choices[0]
        assert (choice.text, choice.finish_reason) == ("ab", "stop")
        assert choice.logprobs is not None
        assert choice.logprobs.tokens == ["a", "b", "!"]
        assert choice.logprobs.token_logprobs == [-0.5] * 3
        assert choice.logprobs.text_offset == [0, 1, 2]
        assert choice.logprobs.top_logprobs is not None
        assert choice.logprobs.top_logprobs[0] == {"a": -0.5}

    async def test_stream(self, http: httpx2.AsyncClient, say: Any) -> None:
        ids = say("xyz")
        options = {"include_usage": True}
        events = await stream(http, "/v1/completions", prompt=[4, 5], logprobs=0, stream_options=options, **IDS)
        choices = [event["choices"][0] for event in events[:-1]]
        assert "".join(choice["text"] for choice in choices) == "xyz"
        assert [choice["token_ids"] for choice in choices] == [[index] for index in ids]
        assert [choice.get("prompt_token_ids") for choice in choices] == [[4, 5]] + [None] * (len(ids) - 1)
        assert [choice["logprobs"]["text_offset"] for choice in choices] == [[0], [1], [2], [3]]
        assert choices[-1]["finish_reason"] == "stop"
        assert events[-1]["usage"]["completion_tokens"] == len(ids)

    @pytest.mark.parametrize("prompt", [None, "", [], [[]], [""], [-1], [9999], {"x": 1}, ["a", 1], [1.5]])
    async def test_prompts_that_are_none(self, http: httpx2.AsyncClient, prompt: Any) -> None:
        error = await refused(http, "/v1/completions", prompt=prompt)
        assert (error["status"], error["param"]) == (400, "prompt")

    async def test_too_many_answers(self, http: httpx2.AsyncClient) -> None:
        assert (await refused(http, "/v1/completions", prompt=["x"] * 100, n=11))["param"] == "n"


class TestTokens:
    async def test_messages_are_tokenized_as_they_are_prompted(
        self, http: httpx2.AsyncClient, say: Any, scripted: Any
    ) -> None:
        body: dict[str, Any] = {"messages": HI, "tools": TOOLS}
        reply = (await http.post("/tokenize", json={**body, "return_token_strs": True})).json()
        say("x")
        await http.post("/v1/chat/completions", json=body)
        assert tuple(reply["tokens"]) == scripted.seen[0].prompt_ids
        assert (reply["count"], reply["max_model_len"]) == (len(reply["tokens"]), 512)
        assert reply["token_strs"][0] == "<|im_start|>"
        shorter = (await http.post("/tokenize", json={**body, "add_generation_prompt": False})).json()
        assert reply["tokens"][: shorter["count"]] == shorter["tokens"]
        assert (shorter["count"] < reply["count"], shorter["token_strs"]) == (True, None)

    async def test_special_tokens_of_the_tokenizer_only_when_asked(self, http: httpx2.AsyncClient) -> None:
        plain = (await http.post("/tokenize", json={"messages": HI})).json()["tokens"]
        more = (await http.post("/tokenize", json={"messages": HI, "add_special_tokens": True})).json()["tokens"]
        assert more[-len(plain) :] == plain

    async def test_round_trip(self, http: httpx2.AsyncClient) -> None:
        text = "hello <|im_start|>é€\n"
        tokens = (await http.post("/tokenize", json={"prompt": text, "add_special_tokens": False})).json()["tokens"]
        assert (await http.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": text}
        assert (await http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}

    async def test_refusals(self, http: httpx2.AsyncClient) -> None:
        for body in ({}, {"prompt": "x", "messages": HI}, {"messages": [{"role": "robot"}]}):
            assert (await refused(http, "/tokenize", **body))["status"] == 400
        for tokens in ([-1], [9999], "x"):
            assert (await refused(http, "/detokenize", tokens=tokens))["param"] == "tokens"

    async def test_tokenizer_info(self, http: httpx2.AsyncClient, tokenizer: Any) -> None:
        info = (await http.get("/tokenizer_info")).json()
        assert info["special_tokens"] == ["<|endoftext|>", "<|im_end|>", "<|im_start|>"]
        assert info["eos_token_ids"] == [tokenizer.eos_token_id]
        assert "<tool_call>" in info["chat_template"]


class TestControl:
    async def test_models_and_adapters(self, sdk: openai.AsyncOpenAI, http: httpx2.AsyncClient, scripted: Any) -> None:
        load = {"lora_name": "policy@2", "lora_path": "/versions/policy@2"}
        assert (await http.post("/v1/load_lora_adapter", json=load)).status_code == 200
        assert scripted.loaded["policy@2"] == Path("/versions/policy@2")
        models = [model async for model in await sdk.models.list()]
        assert [model.id for model in models] == ["base", "policy@1", "policy@2"]
        assert [model.parent for model in models] == [None, "base", "base"]  # type: ignore[attr-defined]
        assert models[0].max_model_len == 512  # type: ignore[attr-defined]
        assert (await refused(http, "/v1/load_lora_adapter", **load))["status"] == 400
        assert (await refused(http, "/v1/load_lora_adapter", lora_name="base", lora_path="/x"))["status"] == 400
        assert (await http.post("/v1/unload_lora_adapter", json={"lora_name": "policy@2"})).status_code == 200
        assert (await refused(http, "/v1/unload_lora_adapter", lora_name="policy@2"))["status"] == 404
        assert (await refused(http, "/v1/unload_lora_adapter"))["status"] == 400

    async def test_an_adapter_that_is_broken(self, http: httpx2.AsyncClient, scripted: Any) -> None:
        scripted.refuse = AdapterError("/x: rank 7 does not fit")
        error = await refused(http, "/v1/load_lora_adapter", lora_name="policy@3", lora_path="/x")
        assert (error["status"], error["message"]) == (400, "/x: rank 7 does not fit")

    async def test_health_metrics_version(self, http: httpx2.AsyncClient, scripted: Any) -> None:
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/metrics.json")).json()["tokens_sampled"] == 7
        assert (await http.get("/version")).json() == {"version": "1"}
        scripted.healthy, scripted.failure = False, "out of memory"
        reply = await http.get("/health")
        assert (reply.status_code, "out of memory" in reply.text) == (503, True)


def test_a_model_without_a_template_is_refused(scripted: Any, new_tokenizer: Callable[..., Any]) -> None:
    with pytest.raises(TemplateError):
        create_app(scripted, new_tokenizer(None), base_name="base")
