"""OpenAI's older text completions: prompts as the app wrote them, ids and logprobs captured like in chat.

It refuses to change prompts: they are the app's own tokens, there is no template whose control tokens data could
spell. A request with several prompts is served, but has no exact ids: one call has one prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from art_backends.proxy import wire
from art_backends.proxy.chat import (
    Asked,
    common,
    effective,
    inject,
    override,
    strip_choice,
    strip_top,
    strip_usage,
)
from art_backends.proxy.engine_client import COMPLETIONS
from art_backends.proxy.identity import SamplingOverrides
from art_backends.proxy.prefix import Prompt
from art_backends.trajectories import Sampling


class Completions:
    """The engine's ``/v1/completions``."""

    path = COMPLETIONS
    has_messages = False
    token_limits: tuple[str, ...] = ("max_tokens",)

    def check(self, body: Mapping[str, Any]) -> None:
        """BadRequestError if no engine should see this."""
        if not isinstance(body.get("prompt"), str | list) or not body["prompt"]:
            raise wire.BadRequestError("prompt must be a text, token ids, or a list of either", param="prompt")

    def asked(self, body: Mapping[str, Any]) -> Asked:
        """What of the answer this request asks for."""
        given = common(body)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and not isinstance(prompt[0], int):
            given["n"] *= len(prompt)
        return Asked(logprobs=body.get("logprobs") is not None, **given)

    def shape(
        self,
        body: Mapping[str, Any],
        *,
        model: str,
        captured: bool,
        overrides: SamplingOverrides | None,
        prompt: Prompt | None,
    ) -> dict[str, Any]:
        """The body for the engine; ``prompt`` is not used."""
        sent = wire.cleaned(body)
        sent["model"] = model
        if overrides is not None:
            override(sent, overrides, *self.token_limits)
        if captured:
            if sent.get("logprobs") is None:
                sent["logprobs"] = 0
            inject(sent)
        return sent

    def sampling(self, sent: Mapping[str, Any]) -> Sampling:
        """The sampling parameters in force, read from the body for the engine."""
        return effective(sent, *self.token_limits)

    def reply(self, data: dict[str, Any], asked: Asked) -> dict[str, Any]:
        """The app's answer; ``data`` is changed in place."""
        strip_top(data, asked)
        for choice in data.get("choices") or ():
            _strip(choice, asked)
        return data

    def chunk(self, data: dict[str, Any], asked: Asked) -> dict[str, Any] | None:
        """The app's chunk, changed in place, or None if nothing is left that the app would have got."""
        strip_top(data, asked)
        if not data.get("choices"):
            return strip_usage(data, asked)
        silent = True
        for choice in data["choices"]:
            carried = "token_ids" in choice
            _strip(choice, asked)
            said = choice.get("text") or choice.get("finish_reason") is not None or choice.get("logprobs") is not None
            if said or not carried:
                silent = False
        if not asked.usage:
            data.pop("usage", None)
        return None if silent else data


def _strip(choice: dict[str, Any], asked: Asked) -> None:
    strip_choice(choice, asked)
    if not asked.logprobs and "logprobs" in choice:
        choice["logprobs"] = None
