"""Asks the engine what it really does: how much of a call it gives back, and whether an adapter answers.

The capture level is stamped on the policy: only an engine that gives token ids and logprobs trains. It refuses to
believe a status code, or a flag: an adapter is in order when it sampled a token of finite probability, logprobs are
processed when a temperature changes them.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from dataclasses import dataclass
from typing import Any

from art_backends.errors import AdapterError, ConfigError, EngineError
from art_backends.proxy.chat import NEUTRAL
from art_backends.proxy.engine import Engine
from art_backends.proxy.engine_client import EngineClient, EngineReply
from art_backends.server.abilities import Abilities, agree
from art_backends.trajectories import CaptureLevel

__all__ = ["Abilities", "abilities", "adapter_answers", "agree", "away", "base_id", "capture_level"]

PROBE_SECONDS = 120.0
HEALTH_SECONDS = 10.0
AWAY = frozenset({502, 503, 504})
_MESSAGES = [{"role": "user", "content": "Hello"}]
# many continuations: at another temperature, or with a penalty, another one is drawn soon
_OPEN = [{"role": "user", "content": "Write many unrelated words, names and numbers: red 7 Oslo red 7 Oslo."}]
SILENT: dict[str, float] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, **NEUTRAL}  # as OpenAI's API has them
_TOKENS = 16  # drawn to see whether the same is drawn
_TOP = 5
_COLD = 0.1  # a temperature at which processed logprobs lie ten times farther apart
_NOISE = 0.05  # between the logprobs of the same tokens
_TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}
_UNLIKELY = -100.0  # a greedy token is the likeliest of all: one of this logprob comes of numbers that are none
_NO_ROUTE = (
    "adapters cannot be loaded while it runs (vLLM: --enable-lora, and the variable "
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment)"
)
_NO_LORA = "it serves no adapters (vLLM: --enable-lora, --max-lora-rank of at least the adapter's)"


async def base_id(engine: Engine) -> str:
    """The name under which the engine serves the base model (the one without a parent)."""
    async with asyncio.timeout(PROBE_SECONDS):
        models = await engine.models()
    for model in models:
        if not model.get("parent"):
            return str(model["id"])
    raise EngineError("the engine serves no base model (/v1/models names none without a parent)", 502, "no_base_model")


async def capture_level(engine: Engine, model: str) -> tuple[CaptureLevel, bool]:
    """What comes back of a call, and whether exact prompts are taken. EngineError if it answers no chat at all."""
    capture, exact, _ = await _level(engine, model)
    return capture, exact


async def _level(engine: Engine, model: str) -> tuple[CaptureLevel, bool, list[int]]:
    """``capture_level``, and the ids of the prompt if they are told."""
    status, reply = await _sample(engine, model)
    if status != 200:
        plain_status, plain = await _chat(engine, {"model": model, "messages": _MESSAGES, "max_tokens": 1})
        if plain_status != 200:
            raise EngineError(
                f"the engine answers no chat completion: {_message(plain)}", plain_status, "engine_unusable"
            )
        return CaptureLevel.TEXT, False, []
    prompt, tokens, logprobs = _ids(reply)
    if not prompt or not tokens:
        return CaptureLevel.TEXT, False, []
    if len(logprobs) != len(tokens):
        return CaptureLevel.IDS, False, prompt
    longer = [*prompt, *tokens]
    status, reply = await _sample(engine, model, {"kv_transfer_params": {"prompt_token_ids": longer}})
    return CaptureLevel.TOKENS, status == 200 and _ids(reply)[0] == longer, prompt


async def adapter_answers(engine: Engine, model: str) -> None:
    """AdapterError if the adapter does not sample a token with a finite logprob; EngineError if the engine is away.

    What it computes is kept apart from the calls' prefix cache: another adapter may get this name one day, if this
    one is not in order.
    """
    status, reply = await _sample(engine, model, {"cache_salt": uuid.uuid4().hex})
    if status in AWAY or (status >= 500 and await away(engine)):
        raise EngineError(f"the engine failed while {model} was tried: {_message(reply)}", status, "engine_error")
    if status != 200:  # with 500: an engine that is well cannot write down what these weights compute
        raise AdapterError(f"{model} was loaded but does not answer: {_message(reply)}")
    if not all(math.isfinite(value) and value > _UNLIKELY for value in _logprobs(reply)):
        raise AdapterError(f"{model} answers with logprobs that are not finite: its weights are broken")


async def away(engine: Engine) -> bool:
    """Whether an engine that failed is not well: then the failure says nothing about what it was asked."""
    try:
        async with asyncio.timeout(HEALTH_SECONDS):
            return not await engine.healthy()
    except (EngineError, TimeoutError):
        return True


async def abilities(engine: EngineClient, model: str) -> Abilities:
    """What a server really does, ``model`` being its base. A dozen small requests; nothing is left loaded.

    ConfigError if it is no engine or serves another model; EngineError if it is away or answers no chat.
    """
    card = await _card(engine, model)
    try:
        capture, exact, prompt = await _level(engine, model)
        told: _Told | None = None
        processed = neutral = None
        if capture is CaptureLevel.TOKENS:
            told = await _draw(engine, model, SILENT)
            processed = await _processed(engine, model, told)
            neutral = await _neutral(engine, model, told)
        length = card.get("max_model_len")
        root = card.get("root")
        return Abilities(
            model=model,
            root=None if root is None else str(root),
            max_model_len=length if isinstance(length, int) else None,
            capture=capture,
            exact_prompts=exact,
            tokenizes=bool(prompt) and await _rendered(engine, model) == prompt,
            processed=processed,
            neutral=neutral,
            tools=await _tools(engine, model),
            lora=await _lora(engine),
            prompt=tuple(prompt),
            top=tuple(told.top) if told is not None else (),
        )
    except EngineError as error:
        raise EngineError(f"{engine.address}: {error}", error.status, error.code) from None


async def _card(engine: EngineClient, model: str) -> dict[str, Any]:
    """What /v1/models says of a model."""
    where = f"engine_url: {engine.address}"
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            models = await engine.models()
    except TimeoutError:
        raise EngineError(f"{where}: no answer within {PROBE_SECONDS:.0f} s", 504, "engine_timeout") from None
    except EngineError as error:
        if error.code in ("engine_unreachable", "engine_interrupted"):
            raise EngineError(
                f"{where}: {error}; is it running, and is this its URL?", error.status, error.code
            ) from None
        if error.status in (401, 403):
            raise ConfigError(f"{where} asks for a key ({error}); start it without one, behind a firewall") from None
        raise ConfigError(f"{where} is no engine: it answers /v1/models with {error}") from None
    names = [str(item.get("id")) for item in models if isinstance(item, dict)]
    if model not in names:
        raise ConfigError(f"{where} does not serve {model}, but {', '.join(names) or 'nothing'}")
    return models[names.index(model)]


# logprobs and sampling


@dataclass(frozen=True)
class _Told:
    """What was drawn and how likely it was; ``top`` are the best logprobs at the first place, in order."""

    ids: list[int]
    logprobs: list[float]
    top: list[float]

    def far_from(self, other: _Told) -> float:
        """The largest difference of logprobs; infinite if other tokens were drawn."""
        if self.ids != other.ids or len(self.logprobs) != len(other.logprobs):
            return math.inf
        pairs = [*zip(self.logprobs, other.logprobs, strict=True), *zip(self.top, other.top, strict=False)]
        return max((abs(a - b) for a, b in pairs), default=0.0)


async def _draw(engine: EngineClient, model: str, sampling: dict[str, Any], tokens: int = _TOKENS) -> _Told:
    body = {
        "model": model,
        "messages": _OPEN,
        "max_tokens": tokens,
        "ignore_eos": True,
        "seed": 7,
        "logprobs": True,
        "top_logprobs": _TOP,
        "return_token_ids": True,
        **sampling,
    }
    status, reply = await _chat(engine, body)
    if status != 200:
        return _Told([], [], [])
    _, ids, logprobs = _ids(reply)
    first = (reply["choices"][0]["logprobs"]["content"] or [{}])[0] if logprobs else {}
    listed = [item.get("logprob") for item in first.get("top_logprobs") or ()]
    # the drawn token may be listed before the best ones: what is sure are the best of one fewer
    best = sorted((float(value) for value in listed if isinstance(value, int | float)), reverse=True)[: _TOP - 1]
    return _Told(ids, logprobs, best)


async def _processed(engine: EngineClient, model: str, warm: _Told) -> bool | None:
    """Whether a low temperature moves the best tokens' logprobs apart; None if the model finds all as likely."""
    cold = await _draw(engine, model, {**SILENT, "temperature": _COLD}, 1)
    if min(len(warm.top), len(cold.top)) < 2:
        return None
    if max(sum(map(math.exp, told.top)) for told in (warm, cold)) > 1.01:
        return False  # they are no logprobs at all, but logits
    apart, colder = warm.top[0] - warm.top[-1], cold.top[0] - cold.top[-1]
    return None if apart < _NOISE / 2 else colder > apart * math.sqrt(1 / _COLD)


async def _neutral(engine: EngineClient, model: str, told: _Told) -> bool | None:
    """Whether a request that says nothing is answered as one that says that all is neutral, from the same seed."""
    noise = told.far_from(await _draw(engine, model, SILENT))
    if not told.ids or noise == math.inf:
        return None  # the same request is answered in different ways
    return (await _draw(engine, model, {})).far_from(told) <= max(_NOISE, 3 * noise)


# routes


async def _rendered(engine: EngineClient, model: str) -> list[int] | None:
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            reply = await engine.tokenize({"model": model, "messages": _MESSAGES, "add_generation_prompt": True})
    except (EngineError, TimeoutError):
        return None
    tokens = (reply or {}).get("tokens")
    return tokens if isinstance(tokens, list) else None


async def _tools(engine: EngineClient, model: str) -> bool:
    body = {"model": model, "messages": _MESSAGES, "max_tokens": 1, "tools": [_TOOL], "tool_choice": "auto"}
    return (await _chat(engine, body))[0] == 200


async def _lora(engine: EngineClient) -> str | None:
    """Why no adapter can be loaded; None if one can. Asked with the name and path of none."""
    name = f"probe-{uuid.uuid4().hex}"
    reply = await _post(engine, "/v1/unload_lora_adapter", {"lora_name": name})
    if name not in reply.content.decode(errors="replace"):
        return _NO_ROUTE
    reply = await _post(engine, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": f"/{name}"})
    if reply.status == 200:  # it looks at the files later
        await _post(engine, "/v1/unload_lora_adapter", {"lora_name": name})
        return None
    return _NO_LORA if b"not enabled" in reply.content or b"enable-lora" in reply.content else None


async def _post(engine: EngineClient, path: str, body: dict[str, Any]) -> EngineReply:
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            return await engine.post(path, body)
    except TimeoutError:
        raise EngineError(f"{path} gave no answer within {PROBE_SECONDS:.0f} s", 504, "engine_timeout") from None


async def _sample(engine: Engine, model: str, more: dict[str, Any] | None = None) -> tuple[int, Any]:
    body = {
        "model": model,
        "messages": _MESSAGES,
        "max_tokens": 1,
        "temperature": 0.0,
        "logprobs": True,
        "top_logprobs": 0,
        "return_token_ids": True,
        **(more or {}),
    }
    return await _chat(engine, body)


async def _chat(engine: Engine, body: dict[str, Any]) -> tuple[int, Any]:
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            status, _, reply = await engine.chat(body)
    except TimeoutError:
        raise EngineError(f"the engine gave no answer within {PROBE_SECONDS:.0f} s", 504, "engine_timeout") from None
    except ValueError as error:
        raise EngineError(f"the engine's answer is no JSON: {error}", 502, "malformed_reply") from None
    return status, reply


def _ids(reply: Any) -> tuple[list[int], list[int], list[float]]:
    try:
        choice = reply["choices"][0]
        logprobs = [float(item["logprob"]) for item in (choice.get("logprobs") or {}).get("content") or []]
        return list(reply.get("prompt_token_ids") or []), list(choice.get("token_ids") or []), logprobs
    except (KeyError, IndexError, TypeError, ValueError):
        return [], [], []


def _logprobs(reply: Any) -> list[float]:
    """The logprobs of an answer, NaN for one that is no number; none if it has none."""
    try:
        content = (reply["choices"][0].get("logprobs") or {}).get("content") or []
        values = [item.get("logprob") for item in content]
    except (KeyError, IndexError, TypeError, AttributeError):
        return []
    return [float(value) if isinstance(value, int | float) else math.nan for value in values]


def _message(reply: Any) -> str:
    try:
        return str(reply["error"]["message"])
    except (KeyError, TypeError):
        return str(reply)[:500]
