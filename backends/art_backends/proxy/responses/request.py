"""A request for a response as one for a chat completion.

Items become messages: what one turn of the assistant said, thought and called is one message again, so that a call
which goes on from an earlier one is recognised. The instructions are the first message and, as with OpenAI, not part
of what a later request goes on from. Fields that nobody here knows pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from art_backends.proxy.responses.memory import Memory, Message
from art_backends.proxy.wire import BadRequestError

# What has its own place in a chat completion, or none.
_TRANSLATED = frozenset(
    {
        "input",
        "instructions",
        "previous_response_id",
        "tools",
        "tool_choice",
        "text",
        "reasoning",
        "include",
        "max_output_tokens",
        "top_logprobs",
        "stream",
        "stream_options",
        "messages",
        "conversation",
        "prompt",
    }
)
# OpenAI's own bookkeeping: no engine knows what to do with it.
_WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "store",
        "user",
        "safety_identifier",
        "service_tier",
        "truncation",
        "prompt_cache_key",
        "prompt_cache_retention",
        "max_tool_calls",
        "background",
        "context_management",
        "moderation",
    }
)
_ELSEWHERE = ("conversation", "prompt")
_LOGPROBS = "message.output_text.logprobs"
_TEXT = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def chat_request(body: Mapping[str, Any], memory: Memory, owner: str) -> tuple[dict[str, Any], list[Message]]:
    """The chat completion to ask for, and its messages without the instructions. BadRequestError."""
    for name in _ELSEWHERE:
        if body.get(name) is not None:
            _refuse(name, f"{name} lives on OpenAI's servers; send the items themselves, or previous_response_id")
    if body.get("n") not in (None, 1):
        _refuse("n", "a response is one answer: n must be 1")
    if body.get("background"):
        _refuse("background", "background responses are not made here; stream the response instead")
    said = _earlier(body, memory, owner)
    said = [*said, *_messages(body.get("input"), memory, owner)]
    chat = {key: value for key, value in body.items() if key not in _TRANSLATED and key not in _WITHOUT_EFFECT}
    chat["messages"] = said
    if body.get("instructions") is not None:
        if not isinstance(body["instructions"], str):
            _refuse("instructions", "instructions must be a text")
        chat["messages"] = [{"role": "system", "content": body["instructions"]}, *said]
    if body.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    chat |= _tools(body) | _form(body) | _logprobs(body)
    effort = _object(body, "reasoning").get("effort")
    if effort is not None:
        chat["reasoning_effort"] = effort
    if body.get("stream") is True:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    return chat, said


def _refuse(param: str, message: str, **more: Any) -> NoReturn:
    raise BadRequestError(message, param=param, **more)


def _object(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        _refuse(name, f"{name} must be an object")
    return value


def _earlier(body: Mapping[str, Any], memory: Memory, owner: str) -> list[Message]:
    name = body.get("previous_response_id")
    if name is None:
        return []
    known = memory.messages(owner, name) if isinstance(name, str) else None
    if known is None:
        message = f"there is no response {name!r} to go on from: {Memory.LIMITS}"
        _refuse("previous_response_id", message, status=404, code="previous_response_not_found")
    return known


# items


def _messages(given: Any, memory: Memory, owner: str) -> list[Message]:
    if given is None:
        return []
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        _refuse("input", "input must be a text or a list of items")
    conversation = _Conversation()
    for number, given_item in enumerate(given):
        where = f"input[{number}]"
        if not isinstance(given_item, Mapping):
            _refuse("input", f"{where} must be an object")
        item: Mapping[str, Any] = given_item
        if item.get("type") == "item_reference":
            found = memory.item(owner, str(item.get("id")))
            if found is None:
                _refuse("input", f"{where}: there is no item {item.get('id')!r} here: {Memory.LIMITS}", status=404)
            item = found
        conversation.add(item, where)
    return conversation.messages


class _Conversation:
    """Items, put together to messages."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._turn: Message | None = None  # the assistant's turn that is being put together

    def add(self, item: Mapping[str, Any], where: str) -> None:
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "message" and item.get("role") == "assistant":
            self._said(_content(item.get("content"), where, ""))
        elif kind == "message":
            role = item.get("role")
            if role not in ("user", "system", "developer"):
                _refuse("input", f"{where}: the role of a message is user, assistant, system or developer")
            self._close()
            # templates of open models know no developer
            told = {"role": "user" if role == "user" else "system", "content": _content(item.get("content"), where)}
            self.messages.append(told)
        elif kind == "function_call":
            self._called(item, where)
        elif kind == "function_call_output":
            if not isinstance(item.get("call_id"), str):
                _refuse("input", f"{where}: call_id must say which call this is the output of")
            self._close()
            output = _content(item.get("output"), where)
            self.messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
        elif kind == "reasoning":
            self._thought(item)
        else:
            _refuse("input", f"{where}: items of type {kind!r} come from OpenAI's own tools; here there are functions")

    def _open(self) -> Message:
        if self._turn is None:
            self._turn = {"role": "assistant", "content": None}
            self.messages.append(self._turn)
        return self._turn

    def _close(self) -> None:
        self._turn = None

    def _said(self, content: Any) -> None:
        turn = self._open()
        if turn["content"] is not None and "tool_calls" in turn and isinstance(content, str):
            turn["content"] += content  # text before and behind the calls of one turn
            return
        if turn["content"] is not None:
            self._close()
            turn = self._open()
        turn["content"] = content

    def _called(self, item: Mapping[str, Any], where: str) -> None:
        name, arguments, call_id = item.get("name"), item.get("arguments"), item.get("call_id")
        if not isinstance(name, str) or not isinstance(arguments, str) or not isinstance(call_id, str):
            _refuse("input", f"{where}: a function_call has call_id, name and arguments, all texts")
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._open().setdefault("tool_calls", []).append(call)

    def _thought(self, item: Mapping[str, Any]) -> None:
        parts = item.get("content") or item.get("summary") or ()
        given = [part.get("text") for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
        text = "".join(part for part in given if isinstance(part, str))
        if not text:
            return
        if self._turn is not None and (self._turn["content"] is not None or "tool_calls" in self._turn):
            self._close()  # a turn begins with its thoughts
        turn = self._open()
        turn["reasoning"] = turn.get("reasoning", "") + text


def _content(content: Any, where: str, between: str = "\n") -> Any:
    """A message's content: one text where all of it is text, else chat's parts. What a model said stands as it was
    said; what it was told in several parts is told as engines do, a line each."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        _refuse("input", f"{where}: the content must be a text or a list of parts")
    parts = [_part(part, where) for part in content]
    if all(part["type"] == "text" for part in parts):
        return between.join(part["text"] for part in parts)
    return parts


def _part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(kind, str) and kind in _TEXT and isinstance(part.get(_TEXT[kind]), str):
        return {"type": "text", "text": part[_TEXT[kind]]}
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        image = {"url": part["image_url"]} | ({"detail": part["detail"]} if part.get("detail") else {})
        return {"type": "image_url", "image_url": image}
    if kind == "input_audio":
        return {"type": "input_audio", "input_audio": part.get("input_audio")}
    _refuse("input", f"{where}: a part of type {kind!r} without its data here cannot be sent to an engine")


# tools, form, logprobs


def _tools(body: Mapping[str, Any]) -> dict[str, Any]:
    given = body.get("tools")
    if given is None:
        given = []
    if not isinstance(given, list):
        _refuse("tools", "tools must be a list")
    tools = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(given)]
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping):
        if choice.get("type") == "function":
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        elif choice.get("type") == "allowed_tools":
            named = choice.get("tools") if isinstance(choice.get("tools"), list) else []
            allowed = [tool.get("name") for tool in named if isinstance(tool, Mapping)]  # type: ignore[union-attr]
            tools = [tool for tool in tools if tool["function"]["name"] in allowed]
            choice = choice.get("mode") or "auto"
        else:
            _refuse("tool_choice", f"a tool_choice of type {choice.get('type')!r} names a tool of OpenAI's servers")
    if not tools:
        return {} if choice in (None, "auto", "none") else {"tool_choice": choice}
    return {"tools": tools} | ({} if choice is None else {"tool_choice": choice})


def _tool(tool: Any, where: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if kind != "function":
        _refuse("tools", f"{where}: a tool of type {kind!r} runs on OpenAI's servers; here a tool is a function")
    if not isinstance(tool.get("name"), str):
        _refuse("tools", f"{where}: a function has a name")
    known = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {key: tool[key] for key in known if tool.get(key) is not None}}


def _form(body: Mapping[str, Any]) -> dict[str, Any]:
    form = _object(_object(body, "text"), "format")
    kind = form.get("type", "text")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    if kind != "json_schema":
        _refuse("text.format", f"text.format of type {kind!r} is not known: text, json_object or json_schema")
    schema = {key: form[key] for key in ("name", "description", "schema", "strict") if form.get(key) is not None}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _logprobs(body: Mapping[str, Any]) -> dict[str, Any]:
    wanted = body.get("include")
    if not isinstance(wanted, list) or _LOGPROBS not in wanted:
        return {}
    return {"logprobs": True, "top_logprobs": body.get("top_logprobs") or 0}
