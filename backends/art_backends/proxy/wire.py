"""What both dialects and the exchange share: OpenAI's error envelope, which headers pass, checks of a request body.

Headers pass unless named here: hop-by-hop ones, secrets, our own, and those by which a client could steer the engine
(its rank, its priority) or fake where it comes from.

It refuses to know a dialect's fields beyond those that are dangerous in every dialect.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

import orjson

from art_backends.trajectories import Node

_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_REQUEST_DROPPED = _HOP_BY_HOP | {
    "host",
    "content-length",
    "content-type",
    "content-encoding",
    "accept-encoding",
    "expect",
    "authorization",
    "api-key",
    "x-api-key",
    "cookie",
    "origin",
    "referer",
    "forwarded",
    "openai-organization",
    "openai-project",
    "x-session-id",
    "x-data-parallel-rank",
    "x-vllm-priority",
}
_REQUEST_PREFIXES = ("x-art-", "x-forwarded-", "proxy-", "sec-")
_REPLY_DROPPED = _HOP_BY_HOP | {"content-length", "content-encoding", "server", "date", "set-cookie", "location"}
# Fields by which clients of other proxies choose or authorise an upstream: here there is nothing to choose.
_BODY_DROPPED = frozenset({"api_base", "base_url", "api_key", "api_version", "organization", "extra_headers"})
# The engine's own switches: which exact prompt to use is ours to say.
_ENGINE_DROPPED = frozenset({"kv_transfer_params", "ec_transfer_params", "priority", "session_id"})
_TEMPLATE_REFUSED = frozenset({"chat_template", "tokenize"})
_MEDIA = ("image_url", "video_url", "audio_url", "input_audio", "file")
# What an engine would unpickle: tensors that a client sends.
_TENSORS = frozenset({"image_embeds", "audio_embeds", "video_embeds", "prompt_embeds"})
_TENSORS_REFUSED = "tensors are not taken; send text, or media as a data: URL"

_DEPTH = 200  # levels of a request's body
_WRITTEN = 253  # levels that orjson writes: what is made of a request has some of its own

_NOWHERE = Node()
ERROR_TYPES = {
    400: "invalid_request_error",
    404: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
}


class BadRequestError(ValueError):
    """A request that is refused before the engine sees it; ``status`` is 400 unless said otherwise."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


def envelope(status: int, message: str, *, param: str | None = None, code: str | None = None) -> bytes:
    """OpenAI's error envelope as JSON."""
    kind = ERROR_TYPES.get(status, "server_error")
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})


def request_headers(headers: Iterable[tuple[str, str]], session: str | None) -> list[tuple[str, str]]:
    """The client's headers as the engine gets them; ``session`` is the rollout, for cache affinity."""
    kept = [
        (name, value)
        for name, value in headers
        if name not in _REQUEST_DROPPED and not name.startswith(_REQUEST_PREFIXES)
    ]
    if session is not None:
        kept.append(("x-session-id", session))
    return kept


def reply_headers(headers: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    """The engine's headers as the client gets them, for ASGI."""
    return [
        (name.encode("latin-1"), value.encode("latin-1", "replace"))
        for name, value in headers
        if name not in _REPLY_DROPPED and not name.startswith("access-control-")
    ]


def node(headers: Mapping[str, str]) -> Node:
    """Where in the agent's program the call comes from, as its hook says in ``x-art-…`` headers."""

    if not any(name.startswith("x-art-") for name in headers):
        return _NOWHERE

    def text(name: str) -> str | None:
        value = headers.get("x-art-" + name)
        return unquote(value) if value else None

    return Node(
        name=text("node"),
        step=_whole(headers.get("x-art-step")),
        checkpoint_ns=text("checkpoint-ns"),
        task_id=text("task-id"),
        node_run_id=text("node-run-id"),
        run_id=text("run-id"),
        agent=text("agent"),
    )


def retry_count(headers: Mapping[str, str]) -> int:
    """How often the SDK has sent this request before."""
    return max(0, _whole(headers.get("x-stainless-retry-count")) or 0)


def _whole(text: str | None) -> int | None:
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def decode_body(content: bytes) -> Any:
    """A request's JSON; BadRequestError if it is none, or is nested too deeply to be written again."""
    try:
        body = orjson.loads(content)
        if content.count(b"[") + content.count(b"{") > _DEPTH:
            deep = body
            for _ in range(_WRITTEN - _DEPTH):
                deep = [deep]
            orjson.dumps(deep)
    except orjson.JSONDecodeError as error:
        raise BadRequestError(f"the body is not valid JSON: {error}") from None
    except orjson.JSONEncodeError:
        raise BadRequestError(f"the body is nested more than {_DEPTH} levels deep") from None
    return body


def check_body(body: Any, *, n_limit: int) -> dict[str, Any]:
    """The body if it is one that any dialect may send on; BadRequestError otherwise."""
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    for name in ("n", "best_of"):
        n = body.get(name)
        if n is not None and (isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= n_limit):
            raise BadRequestError(f"{name} must be a whole number from 1 to {n_limit}", param=name)
    prompts = body.get("prompt")
    if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int):
        answers = len(prompts) * max(body.get("n") or 1, body.get("best_of") or 1)
        if answers > n_limit:
            raise BadRequestError(f"{answers} answers are asked for, {n_limit} are given at most", param="prompt")
    if body.get("prompt_embeds") is not None:
        raise BadRequestError(_TENSORS_REFUSED, param="prompt_embeds")
    if not isinstance(body.get("model"), str):
        raise BadRequestError("you must provide a model parameter", param="model")
    kwargs = body.get("chat_template_kwargs")
    if kwargs is not None and (not isinstance(kwargs, dict) or _TEMPLATE_REFUSED & kwargs.keys()):
        raise BadRequestError(
            "chat_template_kwargs must be an object without chat_template and tokenize", param="chat_template_kwargs"
        )
    return body


def bounded(body: dict[str, Any], names: tuple[str, ...], most: int | None) -> dict[str, Any]:
    """The body with a bound on an answer's tokens: the request's own, which must not exceed ``most``, else that."""
    if most is None:
        return body
    for name in names:
        asked = body.get(name)
        if isinstance(asked, int) and asked > most:
            raise BadRequestError(f"{name} must be at most {most} here", param=name)
    return body if any(body.get(name) is not None for name in names) else {**body, names[0]: most}


def check_messages(messages: Any) -> None:
    """Refuse messages that are no list of objects, media that the engine would have to fetch, and tensors."""
    if not isinstance(messages, list) or not messages:
        raise BadRequestError("messages must be a list that is not empty", param="messages")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequestError(f"messages[{number}] must be an object with a role", param="messages")
        parts = message.get("content")
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict) and not _TENSORS.isdisjoint(part):
                raise BadRequestError(f"messages[{number}]: {_TENSORS_REFUSED}", param="messages")
            if isinstance(part, dict) and _remote(part):
                raise BadRequestError(
                    f"messages[{number}]: media at an address are not fetched; send them as a data: URL",
                    param="messages",
                )


def _remote(part: Mapping[str, Any]) -> bool:
    for name in _MEDIA:
        value = part.get(name)
        url = value.get("url") if isinstance(value, dict) else value
        if isinstance(url, str) and not url.startswith("data:"):
            return True
    return False


def cleaned(body: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the body without what would steer the engine or choose an upstream."""
    return {key: value for key, value in body.items() if key not in _BODY_DROPPED and key not in _ENGINE_DROPPED}


def without_addresses(body: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the body without what would choose or authorise an upstream."""
    return {key: value for key, value in body.items() if key not in _BODY_DROPPED}


def constrained(body: Mapping[str, Any]) -> bool:
    """Whether a grammar, or a change of the distribution that nobody can recompute, is in force."""
    form = body.get("response_format")
    if isinstance(form, dict) and form.get("type") not in (None, "text"):
        return True
    choice = body.get("tool_choice")
    if isinstance(choice, dict) or choice == "required":
        return True
    function = body.get("function_call")
    if isinstance(function, dict):
        return True
    return any(
        body.get(name)
        for name in ("structured_outputs", "logit_bias", "allowed_token_ids", "bad_words", "logits_processors")
    ) or any(key.startswith("guided_") and value for key, value in body.items())


def tools_by_grammar(body: Mapping[str, Any]) -> bool:
    """Whether vLLM writes tool calls under a grammar though they are the model's choice: it does for a tool that is
    ``strict``, and where only one call at a time is wanted."""
    tools = body.get("tools")
    if not isinstance(tools, list) or not tools or body.get("tool_choice") == "none":
        return False
    functions = [tool.get("function") for tool in tools if isinstance(tool, dict)]
    strict = any(isinstance(function, dict) and function.get("strict") is True for function in functions)
    return strict or body.get("parallel_tool_calls") is False
