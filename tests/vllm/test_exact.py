"""Prompt ids, sampled ids and logprobs of a real vLLM, through the proxy: they are the model's, and only the record
has them.

Where a small model would not do what is to be shown (a tool call, two of them, odd spelling), its words are given to
vLLM's sampler (``plugins/scripted.py``); rendering, parsing and streaming of them stay vLLM's.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from art_backends.trajectories import Call, CallStatus, CaptureLevel, PromptMode, Purpose
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.vllm.proxied import WEATHER, Answer, Proxied, Turns

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("vllm")]

USER = [{"role": "user", "content": "Name three rivers of Europe."}]
ASKED = [{"role": "user", "content": "What is the weather in Paris and in Rome?"}]
SMALL = {"max_tokens": 12}
CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
CITY["additionalProperties"] = False
STRICT = {"type": "function", "function": {**WEATHER["function"], "parameters": CITY, "strict": True}}
INJECTED = {"token_ids", "prompt_token_ids", "kv_transfer_params", "stop_reason", "prompt_text", "routed_experts"}
# Valid calls that no template would write like this: other spaces, an escape. (The name stands first: where it comes
# last, vLLM's Hermes parser streams what follows the arguments as part of them.)
CALL = '<tool_call>\n{"name":"weather",  "arguments":  {"days": 2 ,"city":"Par\\u0069s"}}\n</tool_call>'
CALLS = CALL + '\n<tool_call>\n{"name":"weather", "arguments":{"city":"Rome"}}\n</tool_call>'
END = "<|im_end|>"


@pytest.fixture(scope="module")
def reference(smollm: Path) -> PreTrainedModel:
    """The same weights in transformers."""
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32, local_files_only=True).eval()


def logprobs(reference: PreTrainedModel, call: Call, temperature: float = 1.0) -> list[list[float]]:
    """Of each choice's sampled ids, as the trainer would compute them."""
    found = []
    for choice in call.choices:
        ids = torch.tensor([call.prompt_token_ids + choice.token_ids])
        with torch.no_grad():
            logits = reference(input_ids=ids).logits[0, len(call.prompt_token_ids) - 1 : -1]
        values = (logits / temperature).log_softmax(-1)
        found.append(values.gather(-1, torch.tensor(choice.token_ids)[:, None])[:, 0].tolist())
    return found


def rendered(w: Proxied, messages: list[Any], tools: list[Any] | None = None) -> list[int]:
    """The prompt by the same template in transformers."""
    from art_backends.engines.embedded.render import HERMES_PATH, ChatTemplate

    text = ChatTemplate(w.tokenizer, HERMES_PATH.read_text(encoding="utf-8")).render(messages, tools)
    return list(w.tokenizer.encode(text, add_special_tokens=False))


def same(recorded: list[float], computed: list[float], tolerance: float = 1e-3) -> None:
    assert len(recorded) == len(computed)
    assert max(abs(a - b) for a, b in zip(recorded, computed, strict=True)) < tolerance


def says_what_was_sampled(w: Proxied, call: Call, answer: Answer) -> None:
    """The recorded ids decode to what the client saw; nothing that was injected reached it."""
    assert (call.status, call.capture, call.drifted) == (CallStatus.OK, CaptureLevel.TOKENS, False)
    assert not answer.fields & INJECTED
    assert all(data.get("model") in (None, "gpt-4o-mini") for data in answer.raw)
    assert not any(choice.get("logprobs") for data in answer.raw for choice in data.get("choices") or ())
    assert [choice.index for choice in call.choices] == sorted(answer.messages)
    for choice in call.choices:
        assert len(choice.token_ids) == len(choice.logprobs) > 0
        message = answer.messages[choice.index]
        assert choice.finish_reason == answer.finish[choice.index]
        text = w.decode(choice.token_ids)
        if not message.get("tool_calls"):  # a parser may ask for the control tokens' text; the last one is never told
            told = w.decode(choice.token_ids, special=True).removesuffix(END)
            assert (message.get("content") or "") in (text, told)
            continue
        found = [json.loads(call) for call in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)]
        parsed = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message["tool_calls"]]
        assert parsed == [(call["name"], call["arguments"]) for call in found]


async def said(w: Proxied, turns: Turns, *arguments: Any, **options: Any) -> tuple[Answer, Call]:
    answer = await turns.ask(*arguments, **options)
    assert answer.status == 200, answer.raw
    call = await turns.last()
    says_what_was_sampled(w, call, answer)
    return answer, call


@pytest.mark.parametrize("stream", [False, True])
async def test_ids_and_logprobs_are_the_models_own(w: Proxied, reference: PreTrainedModel, stream: bool) -> None:
    turns = await w.open(Purpose.TRAIN)
    # asks for what a training rollout does not do; the record says what was in force
    _, call = await said(w, turns, USER, stream=stream, temperature=0.2, top_p=0.5, seed=3, **SMALL)
    assert call.prompt_token_ids == rendered(w, USER)
    assert (call.sampling.temperature, call.sampling.top_p, call.sampling.seed) == (1.0, 1.0, None)
    assert call.sampling.max_tokens == 12
    same(call.choices[0].logprobs, logprobs(reference, call)[0])


@pytest.mark.parametrize("stream", [False, True])
async def test_several_answers(w: Proxied, reference: PreTrainedModel, stream: bool) -> None:
    turns = await w.open(Purpose.TRAIN)
    _, call = await said(w, turns, USER, stream=stream, n=3, **SMALL)
    assert len({tuple(choice.token_ids) for choice in call.choices}) > 1
    for choice, computed in zip(call.choices, logprobs(reference, call), strict=True):
        same(choice.logprobs, computed)


async def test_logprobs_are_those_of_the_temperature_in_force(w: Proxied, reference: PreTrainedModel) -> None:
    turns = await w.open()
    _, call = await said(w, turns, USER, temperature=0.6, seed=5, **SMALL)
    assert (call.sampling.temperature, call.sampling.seed) == (0.6, 5)
    same(call.choices[0].logprobs, logprobs(reference, call, 0.6)[0])


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings(w: Proxied, stream: bool) -> None:
    """The text ends before the stop string, the record with the token that completed it."""
    words = w.spell("One river, two rivers, three.")
    turns = await w.open()
    answer = await turns.ask(USER, stream=stream, stop=["two"], vllm_xargs={"words": words}, max_tokens=60)
    call = await turns.last()
    assert (answer.message["content"], answer.finish[0]) == ("One river, ", "stop")
    assert not answer.fields & INJECTED
    assert w.decode(call.choices[0].token_ids).startswith("One river, two")
    assert call.choices[0].token_ids == words[: len(call.choices[0].token_ids)]


async def test_structured_output(w: Proxied) -> None:
    """Its logprobs are renormalised by the grammar: recorded, and kept out of training."""
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema}}
    turns = await w.open(Purpose.TRAIN)
    answer, call = await said(w, turns, ASKED, response_format=form, max_tokens=40)
    assert json.loads(answer.message["content"])["city"] in ("Paris", "Rome")
    assert call.sampling.constrained
    assert call.excluded == "constrained"


async def test_a_tool_that_must_be_called(w: Proxied) -> None:
    turns = await w.open()
    answer = await turns.ask(ASKED, tools=[STRICT], tool_choice="required", temperature=0, max_tokens=60)
    call = await turns.last()
    assert call.sampling.constrained
    assert not answer.fields & INJECTED
    text = w.decode(call.choices[0].token_ids)
    for made in answer.message["tool_calls"]:
        assert made["function"]["name"] == "weather"
        assert json.loads(made["function"]["arguments"])["city"] in text


async def test_a_strict_tool_is_written_under_a_grammar(w: Proxied) -> None:
    """Though the choice is the model's: what breaks the tool's schema cannot be sampled, so the record says so."""
    words = w.spell('<tool_call>\n{"name": "weather", "arguments": {"town": 7}}\n</tool_call>')
    asked = {"vllm_xargs": {"words": words}, "max_tokens": len(words)}
    turns = await w.open(Purpose.TRAIN)
    assert (await turns.ask(ASKED, tools=[STRICT], **asked)).status == 500
    assert (await turns.last()).sampling.constrained
    loose = await turns.ask(ASKED, tools=[WEATHER], **asked)
    assert json.loads(loose.message["tool_calls"][0]["function"]["arguments"]) == {"town": 7}
    assert not (await turns.last()).sampling.constrained


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("words", [CALL, "I look. " + CALL, CALLS], ids=["one", "behind words", "two"])
async def test_tool_calls_and_the_next_turn(w: Proxied, words: str, stream: bool) -> None:
    """The model's words are kept to the byte in the next prompt, however the client writes them again."""
    turns = await w.open(Purpose.TRAIN)
    sampled = [*w.spell(words), *w.spell(END)]
    asked: dict[str, Any] = {"tools": [WEATHER], "stream": stream}
    answer, first = await said(w, turns, ASKED, **asked, vllm_xargs={"words": sampled})
    assert answer.finish[0] == "tool_calls"
    assert first.choices[0].token_ids == sampled
    assert first.prompt_token_ids == rendered(w, ASKED, [WEATHER])
    calls = answer.message["tool_calls"]
    again = [
        {**c, "function": {**c["function"], "arguments": json.dumps(json.loads(c["function"]["arguments"]), indent=1)}}
        for c in calls
    ]
    results = [{"role": "tool", "tool_call_id": c["id"], "content": f"Sunny {n}."} for n, c in enumerate(calls)]
    turn = {"role": "assistant", "content": answer.message.get("content"), "tool_calls": again}
    _, second = await said(w, turns, [*ASKED, turn, *results], **asked, **SMALL)
    kept = first.prompt_token_ids + sampled
    assert second.prompt_mode is PromptMode.EXACT
    assert second.continues == first.id
    assert second.prompt_token_ids[: len(kept)] == kept
    tail = w.decode(second.prompt_token_ids[len(kept) :], special=True)
    shown = "".join(f"<|im_start|>tool\n{result['content']}<|im_end|>\n" for result in results)
    assert tail == "\n" + shown + "<|im_start|>assistant\n"


async def test_what_an_app_asks_for_by_name_it_gets(w: Proxied, reference: PreTrainedModel) -> None:
    turns = await w.open()
    answer = await turns.ask(USER, logprobs=True, top_logprobs=2, return_token_ids=True, temperature=1.0, **SMALL)
    call = await turns.last()
    (choice,) = answer.raw[0]["choices"]
    assert choice["token_ids"] == call.choices[0].token_ids
    assert answer.raw[0]["prompt_token_ids"] == call.prompt_token_ids
    assert all(len(entry["top_logprobs"]) >= 2 for entry in choice["logprobs"]["content"])
    same([entry["logprob"] for entry in choice["logprobs"]["content"]], logprobs(reference, call)[0])


async def test_the_second_turn_finds_the_first_in_the_prefix_cache(w: Proxied) -> None:
    long = [{"role": "user", "content": "Say yes. " * 60}]
    turns = await w.open(Purpose.TRAIN)
    answer, _ = await said(w, turns, long, **SMALL)
    before = w.vllm.metric("vllm:prefix_cache_hits_total")
    turn = {"role": "assistant", "content": answer.message["content"]}
    _, second = await said(w, turns, [*long, turn, *USER], **SMALL)
    assert second.prompt_mode is PromptMode.EXACT
    assert w.vllm.metric("vllm:prefix_cache_hits_total") - before > 100
