"""A request for a message as one for a chat completion.

Blocks become messages: results of tools stand before what else the user says, thinking and calls are part of the
assistant's message. An assistant's message at the end is gone on with. Fields that nobody here knows pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import orjson

from art_backends.proxy.wire import BadRequestError

Message = dict[str, Any]

# What has its own place in a chat completion, or none there.
_TRANSLATED = frozenset(
    {
        "messages",
        "system",
        "max_tokens",
        "stop_sequences",
        "stream",
        "tools",
        "tool_choice",
        "thinking",
        "output_config",
        "output_format",
        "metadata",
        "service_tier",
        "inference_geo",
        "cache_control",
        "speed",
        "context_management",  # what it trims is for the client to leave out here
    }
)
_ELSEWHERE = frozenset({"container", "mcp_servers"})
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """The chat completion to ask for. BadRequestError."""
    for name in _ELSEWHERE:
        if body.get(name):
            _refuse(name, f"{name} lives on Anthropic's servers")
    if isinstance(body.get("max_tokens"), bool) or not isinstance(body.get("max_tokens"), int):
        _refuse("max_tokens", "max_tokens: a whole number is needed")
    if body.get("n") not in (None, 1) or body.get("best_of") not in (None, 1):
        _refuse("n", "a message is one answer: n must be 1")
    if not isinstance(body.get("messages"), list):
        _refuse("messages", "messages must be a list")
    chat = {key: value for key, value in body.items() if key not in _TRANSLATED and key not in _ELSEWHERE}
    messages: list[Message] = []
    if body.get("system"):
        messages.append({"role": "system", "content": _text(body["system"], "system")})
    for number, message in enumerate(body["messages"]):
        messages += _messages(message, f"messages[{number}]")
    chat |= {"messages": messages, "max_tokens": body["max_tokens"]}
    if messages and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if body.get("stop_sequences"):
        chat["stop"] = body["stop_sequences"]
    chat |= _tools(body) | _thinking(body) | _form(body)
    if body.get("stream") is True:
        chat |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    return chat


def _refuse(param: str, message: str) -> NoReturn:
    raise BadRequestError(message, param=param)


# messages


def _messages(message: Any, where: str) -> list[Message]:
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ("user", "assistant", "system"):
        _refuse("messages", f"{where}: the role is user or assistant")
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        _refuse("messages", f"{where}: the content is a text or a list of blocks")
    if role == "assistant":
        return [assistant(content, where)]
    results = [_result(block, where) for block in content if block.get("type") == "tool_result"]
    rest = [block for block in content if block.get("type") != "tool_result"]
    if not rest and results:
        return results
    return [*results, {"role": role, "content": _content(rest, where)}]


def assistant(blocks: Sequence[Mapping[str, Any]], where: str) -> Message:
    """The blocks that a model said as a chat message. BadRequestError for one that this model cannot have said."""
    message: Message = {"role": "assistant", "content": None}
    for block in blocks:
        kind = block.get("type")
        if kind == "text" and isinstance(block.get("text"), str):
            message["content"] = (message["content"] or "") + block["text"]
        elif kind == "thinking":
            message["reasoning"] = message.get("reasoning", "") + str(block.get("thinking") or "")
        elif kind == "tool_use" and isinstance(block.get("name"), str) and isinstance(block.get("id"), str):
            arguments = block.get("input")
            function = {
                "name": block["name"],
                "arguments": orjson.dumps({} if arguments is None else arguments).decode(),
            }
            message.setdefault("tool_calls", []).append({"id": block["id"], "type": "function", "function": function})
        elif kind != "redacted_thinking":
            _refuse("messages", f"{where}: a block of type {kind!r} is none that this model can have said")
    return message


def _result(block: Mapping[str, Any], where: str) -> Message:
    if not isinstance(block.get("tool_use_id"), str):
        _refuse("messages", f"{where}: a tool_result names its call by tool_use_id")
    content = block.get("content")
    told = content if isinstance(content, str) else _content([] if content is None else content, where)
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": told}


def _content(blocks: Any, where: str) -> Any:
    """One text where all of it is text, a line for each block as engines do, else chat's parts."""
    if not isinstance(blocks, list):
        _refuse("messages", f"{where}: the content is a text or a list of blocks")
    parts = [_part(block, where) for block in blocks]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(block: Any, where: str) -> dict[str, Any]:
    kind = block.get("type") if isinstance(block, Mapping) else None
    source = block.get("source") if kind in ("image", "document") else None
    source = source if isinstance(source, Mapping) else {}
    if kind == "text" and isinstance(block.get("text"), str):
        return {"type": "text", "text": block["text"]}
    if kind == "image" and source.get("type") == "base64":
        url = f"data:{source.get('media_type')};base64,{source.get('data')}"
        return {"type": "image_url", "image_url": {"url": url}}
    if kind == "image" and source.get("type") == "url":  # whether it is data, the check of all messages sees
        return {"type": "image_url", "image_url": {"url": str(source.get("url"))}}
    if kind == "document" and source.get("type") == "text" and isinstance(source.get("data"), str):
        return {"type": "text", "text": source["data"]}
    _refuse("messages", f"{where}: a block of type {kind!r} without its text or data here cannot be sent to an engine")


def _text(given: Any, param: str) -> str:
    if isinstance(given, str):
        return given
    if isinstance(given, list):
        found = _content(given, param)
        if isinstance(found, str):
            return found
    _refuse(param, f"{param} is a text or a list of blocks of text")


# tools, thinking, form


def _tools(body: Mapping[str, Any]) -> dict[str, Any]:
    given = body.get("tools") or []
    if not isinstance(given, list):
        _refuse("tools", "tools must be a list")
    tools = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(given)]
    choice = body.get("tool_choice")
    if not tools:
        return {}
    asked: dict[str, Any] = {"tools": tools}
    if isinstance(choice, Mapping):
        if choice.get("type") == "tool":
            asked["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
        elif isinstance(choice.get("type"), str) and choice["type"] in _CHOICES:
            asked["tool_choice"] = _CHOICES[choice["type"]]
        else:
            _refuse("tool_choice", "the type of tool_choice is auto, any, tool or none")
        if choice.get("disable_parallel_tool_use"):
            asked["parallel_tool_calls"] = False
    elif choice is not None:
        _refuse("tool_choice", "tool_choice must be an object")
    return asked


def _tool(tool: Any, where: str) -> dict[str, Any]:
    kind = tool.get("type", "custom") if isinstance(tool, Mapping) else None
    if kind not in ("custom", None) or not isinstance(tool.get("name"), str):
        _refuse(
            "tools", f"{where}: a tool of type {kind!r} is Anthropic's own; here a tool has a name and an input_schema"
        )
    function = {"name": tool["name"], "parameters": tool.get("input_schema") or {"type": "object"}}
    function |= {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _thinking(body: Mapping[str, Any]) -> dict[str, Any]:
    """Templates that let their model think or not are told by ``enable_thinking``; the others do not look at it."""
    thinking = body.get("thinking")
    if thinking is None:
        return {}
    if not isinstance(thinking, Mapping):
        _refuse("thinking", "thinking must be an object")
    given = body.get("chat_template_kwargs") or {}
    return {"chat_template_kwargs": {"enable_thinking": thinking.get("type") != "disabled", **given}}


def _form(body: Mapping[str, Any]) -> dict[str, Any]:
    config = body.get("output_config")
    form = config.get("format") if isinstance(config, Mapping) else body.get("output_format")
    asked: dict[str, Any] = {}
    if isinstance(config, Mapping) and config.get("effort") is not None:
        asked["reasoning_effort"] = config["effort"]
    if form is None:
        return asked
    if not isinstance(form, Mapping) or form.get("type") != "json_schema":
        _refuse("output_config", "the format of the output is a json_schema")
    schema = {"name": "output", "schema": form.get("schema"), "strict": True}
    return {**asked, "response_format": {"type": "json_schema", "json_schema": schema}}
