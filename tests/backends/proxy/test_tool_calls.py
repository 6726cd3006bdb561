"""Calls of tools and answers of n, however an engine cuts them into chunks: what each client gets and what is kept."""

import json
from typing import Any

import pytest
from art_backends.proxy.sse import DONE
from art_backends.trajectories import CallStatus, CaptureLevel

from tests.backends.proxy.fake_engine import World, chunk, logprobs_of, sse
from tests.backends.proxy.speakers import CHATTING, SPEAKERS, Heard, Speaker, every, gives
from tests.backends.proxy.test_responses import deltas


def part(index: int | None = None, name: str | None = None, told: Any = "", made: str | None = None) -> dict[str, Any]:
    """A part of a call: its place, name, arguments and id, as far as the engine says them."""
    function = {key: value for key, value in (("name", name), ("arguments", told)) if value is not None}
    given = {"index": index, "id": made, "type": "function" if name else None, "function": function}
    return {key: value for key, value in given.items() if value is not None}


F, G = "find", "go"
VARIANTS: dict[str, list[list[dict[str, Any]]]] = {
    "one after the other": [
        [part(0, F, "", "a")], [part(0, None, '{"city": ')], [part(0, None, '"Rome"}')], [part(1, G, "{}", "b")],
    ],
    "in parallel": [
        [part(0, F, "", "a"), part(1, G, "", "b")], [part(0, None, '{"city": '), part(1, None, "{")],
        [part(1, None, "}"), part(0, None, '"Rome"}')],
    ],
    "the second first": [[part(1, G, "{}", "b")], [part(0, F, '{"city": "Rome"}', "a")]],
    "at once": [[part(0, F, '{"city": "Rome"}', "a"), part(1, G, "{}", "b")]],
    "without ids": [[part(0, F, '{"city": ')], [part(0, None, '"Rome"}'), part(1, G)], [part(1, None, "{}")]],
    "without places": [
        [part(None, F, "", "a")], [part(None, None, '{"city": ')], [part(None, None, '"Rome"}')],
        [part(None, G, "{}", "b")],
    ],
    "with each part's id": [[part(0, F, '{"city": ', "a")], [part(0, F, '"Rome"}', "a")], [part(1, G, "{}", "b")]],
    "no arguments": [[part(0, F, '{"city": "Rome"}', "a")], [part(1, G, None, "b")]],
    "empty arguments": [[part(0, F, '{"city": "Rome"}', "a")], [part(1, G, "", "b")], [part(1, None, "")]],
}  # fmt: skip


def calls(heard: Heard) -> list[tuple[str, str, str]]:
    """Id, name and arguments of each call, as a client puts them together."""
    name = heard.speaker.name
    if name == "responses":
        final = heard.items[-1]["response"] if heard.streamed else heard.json
        found = [item for item in final["output"] if item["type"] == "function_call"]
        return sorted((item["call_id"], item["name"], item["arguments"]) for item in found)
    if name == "messages":
        if not heard.streamed:
            blocks = [block for block in heard.json["content"] if block["type"] == "tool_use"]
            return sorted((block["id"], block["name"], json.dumps(block["input"])) for block in blocks)
        told: dict[int, list[str]] = {}
        for item in heard.items:
            if item["type"] == "content_block_start" and item["content_block"]["type"] == "tool_use":
                told[item["index"]] = [item["content_block"]["id"], item["content_block"]["name"], ""]
            elif item["type"] == "content_block_delta" and item["delta"]["type"] == "input_json_delta":
                told[item["index"]][2] += item["delta"]["partial_json"]
        return sorted((i, n, a) for i, n, a in told.values())
    if not heard.streamed:
        found = heard.json["choices"][0]["message"]["tool_calls"]
        return sorted((c["id"], c["function"]["name"], c["function"]["arguments"]) for c in found)
    joined: dict[int, list[str]] = {}
    for item in heard.items:
        for more in item["choices"][0]["delta"].get("tool_calls") or ():
            known = joined.setdefault(more["index"], ["", "", ""])
            known[0] = known[0] or more.get("id") or ""
            known[1] = known[1] or more["function"].get("name") or ""
            known[2] += more["function"].get("arguments") or ""
    return sorted((i, n, a) for i, n, a in joined.values())


@every(CHATTING)
@pytest.mark.parametrize("variant", VARIANTS)
async def test_calls_in_any_parts_are_those_calls(w: World, speaker: Speaker, variant: str) -> None:
    w.engine.script.append(deltas(*({"tool_calls": parts} for parts in VARIANTS[variant]), finish="tool_calls"))
    heard = await speaker.ask(w, stream=True)
    assert (heard.ended, heard.errors) == (True, [])
    call = w.store.only
    kept = sorted(call.choices[0].message["tool_calls"], key=lambda one: one["function"]["name"])
    assert [(one["function"]["name"], json.loads(one["function"]["arguments"] or "{}")) for one in kept] == [
        (F, {"city": "Rome"}),
        (G, {}),
    ]
    assert (call.capture, call.choices[0].finish_reason) == (CaptureLevel.TOKENS, "tool_calls")
    if speaker.name == "chat" and variant == "without places":
        return  # its parts reach a chat client as the engine cut them
    found = calls(heard)
    assert sorted((name, json.loads(told or "{}")) for _, name, told in found) == [(F, {"city": "Rome"}), (G, {})]
    ids = [made for made, _, _ in found]
    if variant != "without ids":
        assert ids == ["a", "b"]
    elif speaker.name != "chat":
        assert all(ids), "the formats' clients need some"
        assert len(set(ids)) == 2


@every(CHATTING)
async def test_whole_calls(w: World, speaker: Speaker) -> None:
    made = [
        {"id": "a", "type": "function", "function": {"name": F, "arguments": '{"city": "Rome"}'}},
        {"id": "b", "type": "function", "function": {"name": G, "arguments": ""}},
    ]
    message = {"role": "assistant", "content": None, "tool_calls": made}
    w.engine.script.append(gives(speaker.reply(message=message, finish_reason="tool_calls")))
    heard = await speaker.ask(w)
    found = [(made, name, json.loads(told or "{}")) for made, name, told in calls(heard)]
    assert found == [("a", F, {"city": "Rome"}), ("b", G, {})]
    assert w.store.only.choices[0].message["tool_calls"] == made


def choices(speaker: Speaker, last: bool = True) -> list[bytes]:
    """Two answers of a stream, by turns; the second one has no end if it is not ``last``."""
    events = [chunk([{"index": i, "delta": {"role": "assistant"}}], prompt_token_ids=[5, 6, 7]) for i in (0, 1)]
    for letter in "Hi":
        for index in (0, 1):
            one = {"index": index, "delta": {"content": letter}, "token_ids": [ord(letter)], "finish_reason": None}
            events.append(chunk([{**one, "logprobs": logprobs_of([ord(letter)])}]))
    for index in (0, 1) if last else (0,):
        events.append(chunk([{"index": index, "delta": {}, "finish_reason": "stop", "token_ids": []}]))
    events.append(chunk([], usage={"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}))
    return [*(speaker.as_asked(event) for event in events), DONE]


@every(SPEAKERS[:2])
async def test_a_stream_of_several_answers(w: World, speaker: Speaker) -> None:
    w.engine.script.append(sse(choices(speaker)))
    heard = await speaker.ask(w, speaker.body(stream=True, n=2))
    said = {0: "", 1: ""}
    ends = {}
    for item in heard.items:
        (one,) = item["choices"]
        said[one["index"]] += speaker.part(item)
        if one.get("finish_reason") is not None:
            ends[one["index"]] = one["finish_reason"]
    assert (said, ends, heard.ended) == ({0: "Hi", 1: "Hi"}, {0: "stop", 1: "stop"}, True)
    call = w.store.only
    assert [(c.index, c.token_ids, c.finish_reason) for c in call.choices] == [
        (0, [72, 105], "stop"), (1, [72, 105], "stop"),
    ]  # fmt: skip
    assert (call.capture, w.engine.chats[0].body["n"]) == (CaptureLevel.TOKENS, 2)
    w.engine.script.append(sse(choices(speaker, last=False)))
    await speaker.ask(w, speaker.body(stream=True, n=2))
    assert (w.store.all[1].status, w.store.all[1].excluded) == (CallStatus.ERROR, "error"), "one has no end"


@every(SPEAKERS[2:])
async def test_formats_of_one_answer_refuse_more(w: World, speaker: Speaker) -> None:
    for stream in (False, True):
        heard = await speaker.ask(w, speaker.body(stream=stream, n=2))
        assert heard.status == 400
        assert "one answer" in heard.errors[0]
    assert not w.engine.chats
