"""OpenAI chat completions: what the engine is asked, and what the app gets of the answer.

Asked: the app's body, with a few fields changed (see ``shape``). Answered: what an OpenAI server would have said. Of
what the engine adds, an app gets only what it asked for by name (``return_token_ids``, ``prompt_logprobs``,
``logprobs``); vLLM's own fields are removed, fields that nobody here knows pass. ``reasoning`` passes when there is
some, for agents that use it, unless the app said ``include_reasoning: false``.

It refuses to do input or output, and to know where answers are recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from art_backends.proxy import wire
from art_backends.proxy.continuation import effort_kwargs
from art_backends.proxy.engine_client import CHAT
from art_backends.proxy.identity import SamplingOverrides
from art_backends.proxy.prefix import Prompt
from art_backends.trajectories import Sampling

# Sampling parameters that bend the distribution: a training rollout samples from the policy itself. Those that an
# engine may set by itself (from the model's generation_config.json) are said in so many words; the others left out.
NEUTRAL: dict[str, float] = {
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
_BENDING = (
    "seed",
    "typical_p",
    "min_tokens",
    "length_penalty",
    "use_beam_search",
    "best_of",
)
# Fields of vLLM's replies that OpenAI's do not have. Those in the mapping are kept if the app asked by that field.
_EXTRA_TOP = ("prompt_text", "kv_transfer_params", "ec_transfer_params", "metrics")
_EXTRA_CHOICE = ("routed_experts", "prompt_text")


@dataclass(frozen=True)
class Asked:
    """What of the answer the app asked for."""

    model: str
    stream: bool = False
    n: int = 1
    logprobs: bool = False
    usage: bool = True  # in a stream: the chunk with the usage
    reasoning: bool = True
    token_ids: bool = False
    tokens_as_ids: bool = False
    prompt_logprobs: bool = False
    stop_reason: bool = False  # the stop sequence that ended it


class Chat:
    """The engine's ``/v1/chat/completions``. ``stop_reason``: the answers' reader knows vLLM's field of that name."""

    path = CHAT
    has_messages = True
    token_limits: tuple[str, ...] = ("max_completion_tokens", "max_tokens")

    def __init__(self, *, stop_reason: bool = False) -> None:
        self._stop_reason = stop_reason

    def check(self, body: Mapping[str, Any]) -> None:
        """BadRequestError if no engine should see this."""
        wire.check_messages(body.get("messages"))

    def asked(self, body: Mapping[str, Any]) -> Asked:
        """What of the answer this request asks for."""
        return Asked(logprobs=body.get("logprobs") is True, stop_reason=self._stop_reason, **common(body))

    def shape(
        self,
        body: Mapping[str, Any],
        *,
        model: str,
        captured: bool,
        overrides: SamplingOverrides | None,
        prompt: Prompt | None,
    ) -> dict[str, Any]:
        """The body for the engine: the app's, but for

        - ``model``: the engine's name of the version;
        - ``messages`` and ``tools`` with broken-up control tokens, and the exact prompt's ids if there is one;
        - captured calls: ``return_token_ids``, ``logprobs``, ``include_reasoning`` (without it some engines hold ids
          back) and, in a stream, the usage;
        - training rollouts: ``overrides`` in place of the app's sampling parameters;
        - what an effort of reasoning means to the template, in words that every engine renders alike.
        """
        sent = wire.cleaned(body)
        sent["model"] = model
        if prompt is not None:
            sent["messages"] = prompt.messages
            if "tools" in sent:
                sent["tools"] = prompt.tools
        if body.get("reasoning_effort") is not None:
            sent["chat_template_kwargs"] = effort_kwargs(body)
        if overrides is not None:
            override(sent, overrides, *self.token_limits)
        if captured:
            if sent.get("logprobs") is not True:
                sent["top_logprobs"] = 0
            sent["logprobs"] = True
            if sent.get("include_reasoning") is False:
                sent["include_reasoning"] = True
            inject(sent)
            if prompt is not None and prompt.token_ids is not None:
                sent["kv_transfer_params"] = {"prompt_token_ids": prompt.token_ids}
        return sent

    def sampling(self, sent: Mapping[str, Any]) -> Sampling:
        """The sampling parameters in force, read from the body for the engine."""
        return effective(sent, *self.token_limits)

    def reply(self, data: dict[str, Any], asked: Asked) -> dict[str, Any]:
        """The app's answer; ``data`` is changed in place."""
        strip_top(data, asked)
        for choice in data.get("choices") or ():
            self._choice(choice, asked)
            if isinstance(choice.get("message"), dict):
                _strip_message(choice["message"], asked)
        return data

    def chunk(self, data: dict[str, Any], asked: Asked) -> dict[str, Any] | None:
        """The app's chunk, changed in place, or None if nothing is left that the app would have got."""
        strip_top(data, asked)
        choices = data.get("choices")
        if not choices:
            return strip_usage(data, asked)
        silent = True
        for choice in choices:
            carried = "token_ids" in choice
            self._choice(choice, asked)
            delta = choice.get("delta")
            if isinstance(delta, dict):
                carried = _strip_message(delta, asked) or carried
            if delta or choice.get("finish_reason") is not None or choice.get("logprobs") is not None or not carried:
                silent = False
        if not asked.usage:
            data.pop("usage", None)
        return None if silent else data

    def _choice(self, choice: dict[str, Any], asked: Asked) -> None:
        strip_choice(choice, asked)
        if not asked.logprobs:
            if "logprobs" in choice:
                choice["logprobs"] = None
        elif not asked.tokens_as_ids and isinstance(choice.get("logprobs"), dict):
            for entry in choice["logprobs"].get("content") or ():
                _spell(entry)
                for other in entry.get("top_logprobs") or ():
                    _spell(other)


def _strip_message(message: dict[str, Any], asked: Asked) -> bool:
    """Remove what the app did not ask for; True if something with a value went."""
    went = False
    for name in ("reasoning", "reasoning_content"):
        if name in message and (message[name] is None or not asked.reasoning):
            went = message.pop(name) is not None or went
    return went


def _spell(entry: dict[str, Any]) -> None:
    """Give a token that the engine named by its id its text back."""
    token, raw = entry.get("token"), entry.get("bytes")
    if isinstance(token, str) and token.startswith("token_id:") and raw is not None:
        entry["token"] = bytes(raw).decode(errors="replace")


def common(body: Mapping[str, Any]) -> dict[str, Any]:
    """What the requests of both endpoints say about their answers."""
    stream = body.get("stream") is True
    options = body.get("stream_options")
    return {
        "model": body["model"],
        "stream": stream,
        "n": body.get("n") or 1,
        "usage": not stream or (isinstance(options, dict) and options.get("include_usage") is True),
        "reasoning": body.get("include_reasoning") is not False,
        "token_ids": body.get("return_token_ids") is True,
        "tokens_as_ids": body.get("return_tokens_as_token_ids") is True,
        "prompt_logprobs": body.get("prompt_logprobs") is not None,
    }


def override(sent: dict[str, Any], overrides: SamplingOverrides, *limit_names: str) -> None:
    """Put a training rollout's sampling in place of the app's. The first limit name is the one that is written."""
    for name in _BENDING:
        sent.pop(name, None)
    sent.update(NEUTRAL)
    sent["temperature"] = overrides.temperature
    sent["top_p"] = overrides.top_p
    sent["top_k"] = overrides.top_k
    if overrides.max_tokens is not None:
        limit = _limit(sent, limit_names)
        for name in limit_names:
            sent.pop(name, None)
        sent[limit_names[0]] = overrides.max_tokens if limit is None else min(limit, overrides.max_tokens)


def inject(sent: dict[str, Any]) -> None:
    """Ask for ids and, in a stream, for the usage, which tells whether ids are missing."""
    sent["return_token_ids"] = True
    if sent.get("stream") is True:
        options = sent.get("stream_options")
        sent["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}


def _limit(body: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        if isinstance(body.get(name), int):
            return int(body[name])
    return None


def effective(sent: Mapping[str, Any], *limit_names: str) -> Sampling:
    """Sampling parameters in force; what is not a number is left to the engine to refuse."""

    def number(name: str, default: float) -> float:
        value = sent.get(name)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else default

    seed = sent.get("seed")
    return Sampling(
        temperature=number("temperature", 1.0),
        top_p=number("top_p", 1.0),
        top_k=max(0, int(number("top_k", 0))),
        seed=seed if isinstance(seed, int) else None,
        max_tokens=_limit(sent, limit_names),
        constrained=wire.constrained(sent),
    )


def strip_top(data: dict[str, Any], asked: Asked) -> None:
    """The top level of a reply or chunk: the app's name for the model, no extras."""
    if "model" in data:
        data["model"] = asked.model
    for name in _EXTRA_TOP:
        data.pop(name, None)
    if not asked.token_ids:
        data.pop("prompt_token_ids", None)
    if not asked.prompt_logprobs:
        data.pop("prompt_logprobs", None)


def strip_choice(choice: dict[str, Any], asked: Asked) -> None:
    """The extras of a choice."""
    for name in _EXTRA_CHOICE:
        choice.pop(name, None)
    if not asked.stop_reason:
        choice.pop("stop_reason", None)
    if not asked.token_ids:
        choice.pop("token_ids", None)
        choice.pop("prompt_token_ids", None)
    if not asked.prompt_logprobs:
        choice.pop("prompt_logprobs", None)


def strip_usage(data: dict[str, Any], asked: Asked) -> dict[str, Any] | None:
    """A chunk without choices: the usage, unless the app did not ask for it."""
    if data.get("usage") is not None and not asked.usage:
        return None
    return data
