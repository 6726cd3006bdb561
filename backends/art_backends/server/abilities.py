"""What an engine server was found to do (``probe.abilities``), what it lacks for training, and whether several agree.

Each thing that is missing is said with vLLM's flag that brings it. It refuses to ask: this is what the answers mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from art_backends.errors import ConfigError
from art_backends.trajectories import CaptureLevel

_SAME_ANSWER = (
    0.5  # between the logprobs of one prompt at two servers: far more than rounding, far less than other weights
)


@dataclass(frozen=True)
class Abilities:
    """One server's. None where it could not be told."""

    model: str  # the name under which it serves the base model
    root: str | None  # where it has that from
    max_model_len: int | None
    capture: CaptureLevel
    exact_prompts: bool
    tokenizes: bool  # /tokenize gives the ids that its own template renders
    processed: bool | None  # logprobs are those of the distribution that was sampled from, not of the model's own
    neutral: bool | None  # what a request does not say is neutral: temperature 1, no top_p, top_k, penalties
    tools: bool  # tool calls are parsed
    lora: str | None  # why no adapter can be loaded; None if one can
    prompt: tuple[int, ...] = ()  # ids of the probe's prompt
    top: tuple[float, ...] = ()  # the best logprobs behind it

    @property
    def fatal(self) -> list[str]:
        """What makes training impossible."""
        found = []
        if self.capture is CaptureLevel.TEXT:
            found.append("it gives no token ids: a vLLM of at least 0.10.2 is needed (return_token_ids)")
        elif self.capture is CaptureLevel.IDS:
            found.append("it gives no logprobs (vLLM: --max-logprobs must not be 0)")
        if self.lora is not None:
            found.append(self.lora)
        return found

    @property
    def warnings(self) -> list[str]:
        """What training can do without, at a price."""
        found = []
        if self.processed is False:
            found.append(
                "its logprobs are the model's own, not those of the distribution that it samples from: calls at "
                "another temperature than 1, with top_p, top_k or penalties are recorded wrongly (vLLM: "
                "--logprobs-mode processed_logprobs)"
            )
        if self.neutral is False:
            found.append(
                "it samples by the model's own generation_config where a request says nothing, repetition penalties "
                "included (vLLM: --generation-config vllm)"
            )
        if not self.tools:
            found.append(
                "it takes no tools, or does not parse calls of them (vLLM: --enable-auto-tool-choice "
                "--tool-call-parser NAME, the one that fits the model)"
            )
        if not self.exact_prompts:
            found.append(
                "it takes no exact prompts (kv_transfer_params.prompt_token_ids; vLLM 0.32 does): what it has said is "
                "rendered anew in later turns, and the tokens may drift"
            )
        elif not self.tokenizes:
            found.append(
                "its /tokenize does not give the ids of a chat prompt (vLLM has it): tokens may drift in later turns"
            )
        return found

    @property
    def problems(self) -> list[str]:
        """All that is missing, each with the flag that brings it; what is fatal comes first."""
        return self.fatal + self.warnings


def agree(names: Sequence[str], found: Sequence[Abilities]) -> None:
    """ConfigError if two servers would not answer alike; it names both, and in what they differ."""
    for name, other in zip(names[1:], found[1:], strict=True):
        for difference in _differences(found[0], other):
            raise ConfigError(
                f"engine_url: {names[0]} and {name} do not serve the same: {difference}; start both from the same "
                "model with the same flags"
            )


def _differences(one: Abilities, other: Abilities) -> Iterator[str]:
    if one.model != other.model:
        yield f"the base model is called {one.model} and {other.model} (vLLM: --served-model-name)"
    if _last(one.root) != _last(other.root):
        yield f"the base model comes from {one.root} and {other.root}"
    if one.max_model_len != other.max_model_len:
        yield f"the context holds {one.max_model_len} and {other.max_model_len} tokens (vLLM: --max-model-len)"
    if one.prompt != other.prompt:
        yield f"one conversation is rendered as {len(one.prompt)} and {len(other.prompt)} tokens that are not the same"
    if any(abs(a - b) > _SAME_ANSWER for a, b in zip(one.top, other.top, strict=False)):
        yield f"they find the likeliest next token likely to other degrees: {one.top[0]:.2f} and {other.top[0]:.2f}"
    for which, these, others in (("first", one.problems, other.problems), ("second", other.problems, one.problems)):
        for problem in these:
            if problem not in others:
                yield f"of the {which} alone, {problem}"


def _last(root: str | None) -> str | None:
    """The last part of a path or name: machines keep a model in different folders."""
    return None if root is None else root.rstrip("/").rpartition("/")[2]
