"""What the engine is asked and what is left of its answer, without any HTTP."""

from typing import Any

import pytest
from art_backends.proxy import wire
from art_backends.proxy.chat import Chat
from art_backends.proxy.identity import SamplingOverrides
from art_backends.proxy.prefix import Prompt
from art_backends.trajectories import PromptMode

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
chat = Chat()


def shape(body: dict[str, Any], *, captured: bool = True, overrides: Any = None, prompt: Any = None) -> dict[str, Any]:
    before = repr(body)
    sent = chat.shape(body, model="p@1", captured=captured, overrides=overrides, prompt=prompt)
    assert repr(body) == before  # the app's body is recorded as it came
    return sent


def test_unknown_fields_pass_and_the_rest_is_injected() -> None:
    sent = shape({**BODY, "x_unknown": [1], "user": "u"})
    assert sent == {
        **BODY, "model": "p@1", "x_unknown": [1], "user": "u",
        "return_token_ids": True, "logprobs": True, "top_logprobs": 0,
    }  # fmt: skip
    assert shape(BODY, captured=False) == {**BODY, "model": "p@1"}


def test_logprobs_that_the_app_asked_for_stay() -> None:
    assert shape({**BODY, "logprobs": True, "top_logprobs": 5})["top_logprobs"] == 5
    assert shape({**BODY, "logprobs": False, "top_logprobs": 5})["top_logprobs"] == 0


def test_exact_prompts_and_broken_control_tokens() -> None:
    prompt = Prompt(
        [1, 2], PromptMode.EXACT, "c", 0, False, None, messages=[{"role": "user", "content": "y"}], tools=[]
    )
    sent = shape({**BODY, "tools": [{"type": "function"}]}, prompt=prompt)
    assert sent["kv_transfer_params"] == {"prompt_token_ids": [1, 2]}
    assert sent["messages"] == prompt.messages
    assert sent["tools"] == []
    assert "tools" not in shape(BODY, prompt=prompt)


@pytest.mark.parametrize(
    ("asked", "cap", "sent"),
    [
        ({}, None, {}),
        ({}, 9, {"max_completion_tokens": 9}),
        ({"max_tokens": 5}, 9, {"max_completion_tokens": 5}),
        ({"max_tokens": 50}, 9, {"max_completion_tokens": 9}),
        ({"max_tokens": 5, "max_completion_tokens": 7}, 9, {"max_completion_tokens": 7}),
        ({"max_tokens": 50}, None, {"max_tokens": 50}),
    ],
)
def test_the_cap_of_training_rollouts(asked: dict[str, int], cap: int | None, sent: dict[str, int]) -> None:
    got = shape({**BODY, **asked}, overrides=SamplingOverrides(max_tokens=cap))
    assert {key: got[key] for key in got if key.startswith("max_")} == sent
    assert chat.sampling(got).max_tokens == next(iter(sent.values()), None)


@pytest.mark.parametrize(
    ("field", "grammar"),
    [
        ({}, False),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, False),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": False}}]}, False),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, True),
        ({"tools": [{"type": "function", "function": {"strict": True}}], "tool_choice": "none"}, False),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "parallel_tool_calls": False}, True),
        ({"tools": [], "parallel_tool_calls": False}, False),
        ({"tools": ["odd", {"function": None}]}, False),
    ],
)
def test_tools_that_vllm_writes_under_a_grammar(field: dict[str, Any], grammar: bool) -> None:
    assert wire.tools_by_grammar({**BODY, **field}) is grammar


def test_what_bends_the_distribution_goes_in_training_rollouts() -> None:
    bent = {"seed": 1, "min_p": 0.1, "frequency_penalty": 1, "repetition_penalty": 1.1, "min_tokens": 3, "top_k": 5}
    got = shape({**BODY, **bent, "temperature": 0}, overrides=SamplingOverrides())
    neutral = {"min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    expected = neutral | {"top_k": 0, "temperature": 1.0}  # said, because an engine may have defaults of its own
    assert {key: got[key] for key in (*bent, *expected) if key in got} == expected
    own = shape({**BODY, **bent, "temperature": 0})
    assert bent.items() <= own.items()
    assert (chat.sampling(own).temperature, chat.sampling(own).top_k, chat.sampling(own).seed) == (0.0, 5, 1)


@pytest.mark.parametrize(
    ("field", "is_constrained"),
    [
        ({"response_format": {"type": "text"}}, False),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, True),
        ({"response_format": {"type": "json_object"}}, True),
        ({"tool_choice": "auto"}, False),
        ({"tool_choice": "none"}, False),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, True),
        ({"structured_outputs": {"regex": "a"}}, True),
        ({"guided_json": {"type": "object"}}, True),
        ({"logit_bias": {"1": 2}}, True),
        ({"logit_bias": {}}, False),
    ],
)
def test_grammars_are_seen(field: dict[str, Any], is_constrained: bool) -> None:
    assert chat.sampling(shape({**BODY, **field})).constrained is is_constrained


def piece(delta: dict[str, Any], **choice: Any) -> dict[str, Any]:
    return {"model": "p@1", "choices": [{"index": 0, "delta": delta, "finish_reason": None, **choice}]}


def stripped(data: dict[str, Any], **body: Any) -> dict[str, Any] | None:
    return chat.chunk(data, chat.asked({**BODY, "stream": True, **body}))


def test_chunks_that_only_carry_tokens_are_swallowed() -> None:
    tokens = {"token_ids": [1], "logprobs": {"content": [{"token": "a", "logprob": -1.0}]}}
    assert stripped(piece({}, **tokens)) is None
    assert stripped(piece({"reasoning": "hm"}, **tokens), include_reasoning=False) is None
    assert stripped(piece({"reasoning": "hm"}, **tokens)) is not None
    assert stripped(piece({}, **tokens), logprobs=True) is not None  # the app asked for them
    assert stripped(piece({}, finish_reason="stop", **tokens)) is not None
    assert stripped(piece({})) is not None  # an empty chunk of the engine's own
    kept = stripped(piece({"content": "a"}, stop_reason=None, **tokens))
    assert kept == piece({"content": "a"}, logprobs=None) | {"model": "m"}


def test_usage_only_if_asked() -> None:
    usage = {"choices": [], "usage": {"completion_tokens": 1}}
    assert stripped(dict(usage)) is None
    assert stripped(dict(usage), stream_options={"include_usage": True}) == usage
    assert "usage" not in (stripped(piece({"content": "a"}) | {"usage": None}) or {})
    assert stripped({"choices": [], "prompt_filter_results": []}) is not None
