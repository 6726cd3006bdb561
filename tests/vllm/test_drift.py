"""Over whole conversations on a real vLLM, with real chat templates: what the model said stays what it said.

vLLM renders, parses and streams; only the model's words are given to its sampler (``plugins/scripted.py``), because a
random model has none. Each family is one server.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from art_backends.server import probe_reasoning, probe_sampling
from art_backends.trajectories import Call, CallStatus, CaptureLevel, PromptMode, Purpose

from tests.backends.proxy.conftest import templates_folder
from tests.vllm.families import FAMILIES, REASON, Family, arguments
from tests.vllm.proxied import WEATHER, Answer, Proxied, Turns, proxied
from tests.vllm.serving import Vllm, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("vllm")]

ASKED = [{"role": "user", "content": "What is the weather in Paris?"}]
TOMORROW = {"role": "user", "content": "And tomorrow?"}
OWN_SAMPLING = ("--generation-config", "vllm")


@pytest.fixture(scope="module", params=list(FAMILIES))
def served(
    request: pytest.FixtureRequest, vllm_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Family, Vllm]]:
    """A family and the vLLM that serves a model of it."""
    if templates_folder() is None:
        pytest.skip("the package trl (its chat templates) is not installed: pip install --no-deps trl==1.16.0")
    family = FAMILIES[request.param]
    model = family.make(tmp_path_factory.mktemp("family"))
    flags = (*family.flags, *(() if family.sampling else OWN_SAMPLING))
    flags += ("--dtype", "float32", "--max-model-len", "4096", "--logprobs-mode", "processed_logprobs")
    with serving(vllm_python, model, *flags, "--logits-processors", "scripted:Scripted") as vllm:
        yield family, vllm


@pytest.fixture
def family(served: tuple[Family, Vllm]) -> Family:
    return served[0]


@pytest.fixture
async def w(served: tuple[Family, Vllm], tmp_path: Path) -> AsyncIterator[Proxied]:
    """The proxy as the server makes it: what the engine does is asked."""
    async with proxied(served[1], tmp_path, probed=True) as made:
        yield made


async def say(
    turns: Turns, messages: list[Any], words: str, *, stream: bool = False, **more: Any
) -> tuple[Answer, Call]:
    """The model says ``words`` in pieces of one character; all of it is recorded and ends as it ends."""
    sampled = turns.w.spell(words)
    asked = {"tools": [WEATHER], "stream": stream, "vllm_xargs": {"words": sampled}, "max_tokens": len(sampled) + 4}
    answer = await turns.ask(messages, **asked, **more)
    assert answer.status == 200, answer.raw
    call = await turns.last()
    assert (call.status, call.capture, call.drifted) == (CallStatus.OK, CaptureLevel.TOKENS, False)
    assert call.choices[0].token_ids == sampled
    return answer, call


def echoed(answer: Answer) -> dict[str, Any]:
    """The answer as a client sends it back: arguments written anew, the reasoning left out."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.message.get("content") or ""}
    if answer.message.get("tool_calls"):
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.dumps(given, indent=2)}}
            for call, given in zip(answer.message["tool_calls"], arguments(answer.message), strict=True)
        ]
    return message


def results(answer: Answer, *texts: str) -> list[dict[str, Any]]:
    calls = answer.message["tool_calls"]
    return [
        {"role": "tool", "tool_call_id": c["id"], "name": "weather", "content": t}
        for c, t in zip(calls, texts, strict=True)
    ]


async def rendered(w: Proxied, messages: list[Any]) -> str:
    """The text of a prompt as vLLM's own template renders it."""
    reply = await w.engine.tokenize({"messages": messages, "tools": [WEATHER]})
    assert reply is not None
    return w.decode(reply["tokens"], special=True)


def own_spans(call: Call, earlier: list[Call]) -> list[tuple[int, int]]:
    """Where in a call's prompt the model's own words stand, by the calls that it continues."""
    spans = []
    before = next((item for item in earlier if item.id == call.continues), None)
    while before is not None:
        start = len(before.prompt_token_ids)
        ids = before.choices[0].token_ids
        assert call.prompt_token_ids[: start + len(ids)] == before.prompt_token_ids + ids
        spans.append((start, start + len(ids)))
        before = next((item for item in earlier if item.id == before.continues), None)
    return spans[::-1]


def check(w: Proxied, family: Family, call: Call, earlier: list[Call], plain: str, *, reasoned: bool) -> None:
    """A later prompt: exact, and apart from the model's own words it reads as the template has it."""
    if reasoned and not family.kept:
        assert (call.prompt_mode, call.continues, call.drifted) == (PromptMode.RENDERED, None, False)
        assert w.decode(call.prompt_token_ids, special=True) == plain
        return
    assert call.prompt_mode is PromptMode.EXACT
    assert call.continues == earlier[-1].id
    begin, position = 0, 0
    for start, end in own_spans(call, earlier):
        context = w.decode(call.prompt_token_ids[begin:start], special=True)
        found = plain.find(context.removesuffix("<think>\n"), position)  # which an earlier turn is rendered without
        assert found == 0 if not begin else found >= position, (context, plain[position:])
        position, begin = found + len(context.removesuffix("<think>\n")), end
    tail = w.decode(call.prompt_token_ids[begin:], special=True)
    assert plain.endswith(tail)
    assert len(plain) - len(tail) >= position


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_does_not_drift(w: Proxied, family: Family, stream: bool) -> None:
    """Tool calls, their results, another call, an answer, and an answer to a new question."""
    turns, reasoned = await w.open(Purpose.TRAIN), family.reasoning
    cities = ("Paris", "Rome") if family.parallel else ("Paris",)
    messages: list[Any] = list(ASKED)
    hits = w.vllm.metric("vllm:prefix_cache_hits_total")

    first, _ = await say(turns, messages, family.calls(*cities), stream=stream)
    assert (first.finish[0], arguments(first.message)) == ("tool_calls", [{"city": city} for city in cities])
    assert_reasoning(first, family)
    messages += [echoed(first), *results(first, *("Sunny, 21 degrees." for _ in cities))]
    plain = await rendered(w, messages)
    second, call = await say(turns, messages, family.calls("Oslo"), stream=stream)
    assert arguments(second.message) == [{"city": "Oslo"}]
    assert_reasoning(second, family)
    earlier = await turns.calls()
    check(w, family, call, earlier[:1], plain, reasoned=reasoned)
    assert w.vllm.metric("vllm:prefix_cache_hits_total") > hits  # what the first call computed was found again

    messages += [echoed(second), *results(second, "Rain, 12 degrees.")]
    plain = await rendered(w, messages)
    third, call = await say(turns, messages, family.plain("It is sunny there."), stream=stream)
    assert (third.finish[0], third.message["content"].strip()) == ("stop", "It is sunny there.")
    assert_reasoning(third, family)
    check(w, family, call, earlier, plain, reasoned=reasoned)

    messages += [echoed(third), TOMORROW]
    plain = await rendered(w, messages)
    fourth, call = await say(turns, messages, family.plain("Tomorrow, too."), stream=stream)
    assert fourth.message["content"].strip() == "Tomorrow, too."
    assert_reasoning(fourth, family)
    check(w, family, call, (await turns.calls())[:3], plain, reasoned=reasoned)

    calls = await turns.calls()
    assert [item.drifted for item in calls] == [False] * 4
    assert w.proxy.counters.drifted == 0


def assert_reasoning(answer: Answer, family: Family) -> None:
    assert (answer.message.get("reasoning") or "").strip() == (REASON if family.reasoning else "")


async def test_edited_and_summarised_histories_are_branches(w: Proxied, family: Family) -> None:
    turns = await w.open(Purpose.TRAIN)
    first, _ = await say(turns, list(ASKED), family.plain("It is sunny."))
    edited = [*ASKED, {"role": "assistant", "content": "It is raining."}, TOMORROW]
    summary = [{"role": "user", "content": "We spoke of the weather in Paris. And tomorrow?"}]
    for history in (edited, summary):
        plain = await rendered(w, history)
        _, call = await say(turns, history, family.plain("Sunny."))
        assert (call.prompt_mode, call.continues) == (PromptMode.RENDERED, None)
        assert w.decode(call.prompt_token_ids, special=True) == plain
    # and the history as it was still goes on from where it was
    _, call = await say(turns, [*ASKED, echoed(first), TOMORROW], family.plain("Sunny."))
    assert (call.prompt_mode is PromptMode.EXACT) == (family.kept or not family.reasoning)
    assert w.proxy.counters.drifted == 0


async def test_a_turn_cut_by_length_goes_on(w: Proxied, family: Family) -> None:
    """The end of the turn is put in, because the model did not say it."""
    turns = await w.open(Purpose.TRAIN)
    words = w.spell(family.plain("It is sunny there."))[:-4]
    answer = await turns.ask(ASKED, tools=[WEATHER], vllm_xargs={"words": words}, max_tokens=len(words))
    assert answer.finish[0] == "length"
    history = [*ASKED, echoed(answer), TOMORROW]
    plain = await rendered(w, history)
    _, call = await say(turns, history, family.plain("Sunny."))
    check(w, family, call, (await turns.calls())[:1], plain, reasoned=family.reasoning)


async def test_reasoning_that_the_app_sends_is_rendered_alike(w: Proxied, family: Family) -> None:
    """A worked example with reasoning, under the name that most clients use: /tokenize must see it as a chat does."""
    made = {"name": "weather", "arguments": json.dumps({"city": "Paris"})}
    example: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "A secret thought."}
    example["tool_calls"] = [{"id": "call00001", "type": "function", "function": made}]
    begin = [*ASKED, example, {"role": "tool", "tool_call_id": "call00001", "content": "Fog."}]
    turns = await w.open(Purpose.TRAIN)
    first, call = await say(turns, begin, family.calls("Oslo"))
    assert ("A secret thought." in w.decode(call.prompt_token_ids)) == family.shows_reasoning
    history = [*begin, echoed(first), *results(first, "Rain.")]
    _, second = await say(turns, history, family.plain("It is sunny."))
    assert not second.drifted
    assert (second.prompt_mode is PromptMode.EXACT) == (family.kept or not family.reasoning)


async def test_whether_reasoning_may_be_kept_is_found_out(w: Proxied, family: Family) -> None:
    assert await probe_reasoning.may_be_kept(w.engine, w.policies.base_id) is family.kept


async def test_the_engines_own_sampling_is_found_out_and_recorded(w: Proxied, family: Family) -> None:
    found = await probe_sampling.defaults(w.engine, w.policies.base_id)
    assert {name: found.get(name) for name, _ in family.sampling} == dict(family.sampling)
    assert bool(found) == bool(family.sampling)
    turns = await w.open(Purpose.EVAL)
    await turns.ask(ASKED, max_tokens=2)
    silent = (await turns.last()).sampling
    await turns.ask(ASKED, max_tokens=2, temperature=0.3)
    told = (await turns.last()).sampling
    own = dict(family.sampling)
    assert (silent.temperature, silent.top_p, silent.top_k) == (
        own.get("temperature", 1.0),
        own.get("top_p", 1.0),
        own.get("top_k", 0),
    )
    assert (told.temperature, told.top_p) == (0.3, own.get("top_p", 1.0))
    training = await w.open(Purpose.TRAIN)
    await training.ask(ASKED, max_tokens=2)
    assert (await training.last()).sampling.temperature == 1.0
