"""A provider's way of asking, in OpenAI's words: messages, tools, tool choice, formats and settings.

Known are the forms in which LangChain's classes bind them: Anthropic's, Google's, Ollama's, Bedrock's and OpenAI's own.
It refuses to drop a wish that changes what the app gets: what has no translation is an UntranslatableError.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.utils.function_calling import convert_to_openai_tool

# The app's settings that are passed on, under OpenAI's names.
_SETTINGS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "seed": "seed",
    "max_tokens": "max_completion_tokens",
    "max_completion_tokens": "max_completion_tokens",
    "max_output_tokens": "max_completion_tokens",
    "num_predict": "max_completion_tokens",
    "parallel_tool_calls": "parallel_tool_calls",
}
_FILLED_IN = 4096  # Anthropic's API wants a max_tokens: its class sets the model's most, or this if it is not known
_STOPS = ("stop", "stop_sequences")


class UntranslatableError(Exception):
    """What an OpenAI-compatible server cannot be asked for; the text names it."""


def plain_messages(messages: Sequence[BaseMessage]) -> list[BaseMessage]:
    """The messages without what only their provider understands: text as text, tool calls as LangChain has them.

    Pictures and the like stay as they are.
    """
    return [_plain(message) for message in messages]


def _plain(message: BaseMessage) -> BaseMessage:
    if isinstance(message, AIMessage):
        return AIMessage(
            content=_text(message.content),
            name=message.name,
            id=message.id,
            tool_calls=message.tool_calls,
            invalid_tool_calls=message.invalid_tool_calls,
        )
    if isinstance(message.content, str) or not all(_is_text(block) for block in message.content):
        return message
    return message.model_copy(update={"content": _text(message.content)})


def _is_text(block: Any) -> bool:
    return isinstance(block, str) or (isinstance(block, dict) and block.get("type") == "text")


def _text(content: str | list[Any]) -> str:
    if isinstance(content, str):
        return content
    return "".join(block if isinstance(block, str) else str(block["text"]) for block in content if _is_text(block))


def options(model: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The request's options in OpenAI's words: the model's own settings beneath those of the call.

    Only settings that the app has set count: a provider's default is no wish. Raises UntranslatableError.
    """
    own: dict[str, Any] = {name: getattr(model, name, None) for name in model.model_fields_set}
    if own.get("max_tokens") == (getattr(model, "profile", None) or {}).get("max_output_tokens", _FILLED_IN):
        del own["max_tokens"]
    nested = kwargs.get("options")  # Ollama's
    layers: list[Mapping[str, Any]] = [own, nested if isinstance(nested, Mapping) else {}, kwargs]
    found: dict[str, Any] = {}
    for given in layers:
        for name, wire in _SETTINGS.items():
            if given.get(name) is not None:
                found[wire] = given[name]
        for name in _STOPS:
            if given.get(name):
                found["stop"] = list(given[name])
    if isinstance(found.get("max_completion_tokens"), int) and found["max_completion_tokens"] < 1:
        del found["max_completion_tokens"]  # Ollama's word for "no bound"
    if kwargs.get("tools"):
        found["tools"] = [tool for given in kwargs["tools"] for tool in _tools(given)]
        found.update(_choice(kwargs))
    found.update(_format(kwargs))
    return found


def _tools(given: Any) -> Iterable[dict[str, Any]]:
    """OpenAI's form of one of the provider's tools (Google's holds several)."""
    if isinstance(given, Mapping) and isinstance(given.get("function_declarations"), Sequence):
        return [
            {"type": "function", "function": {**_lower_types(item), "parameters": _lower_types(item["parameters"])}}
            if item.get("parameters")
            else {"type": "function", "function": dict(item)}
            for item in given["function_declarations"]
        ]
    if isinstance(given, Mapping) and "function" not in given and "input_schema" not in given and "name" not in given:
        raise UntranslatableError(f"the provider's own tool {next(iter(given), '?')}")
    if isinstance(given, Mapping) and given.get("type") not in (None, "function", "custom") and "name" in given:
        raise UntranslatableError(f"the provider's own tool {given['name']}")
    known = {key: value for key, value in given.items() if key != "type"} if _is_anthropic(given) else given
    return [convert_to_openai_tool(known)]


def _is_anthropic(given: Any) -> bool:
    return isinstance(given, Mapping) and "input_schema" in given


def _lower_types(schema: Any) -> Any:
    """Google writes STRING where JSON Schema writes string."""
    if isinstance(schema, Mapping):
        return {
            key: value.lower() if key == "type" and isinstance(value, str) else _lower_types(value)
            for key, value in schema.items()
        }
    if isinstance(schema, list):
        return [_lower_types(item) for item in schema]
    return schema


def _choice(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """``tool_choice`` (and ``parallel_tool_calls``) of a provider's wish."""
    wish = kwargs.get("tool_choice")
    config = kwargs.get("tool_config")
    if wish is None and isinstance(config, Mapping):
        calling = config.get("function_calling_config") or {}
        wish = calling.get("allowed_function_names") or str(calling.get("mode") or "auto").lower()
    if isinstance(wish, Mapping) and wish.get("type") == "function":
        return {"tool_choice": dict(wish)}
    found: dict[str, Any] = {}
    if isinstance(wish, Mapping):
        if wish.get("disable_parallel_tool_use"):
            found["parallel_tool_calls"] = False
        wish = wish.get("name") or wish.get("type")
    if isinstance(wish, Sequence) and not isinstance(wish, str):
        wish = wish[0] if len(wish) == 1 else "any"
    if wish in (None, False):
        return found
    if wish in (True, "any", "required"):
        return {**found, "tool_choice": "required"}
    if wish in ("auto", "none"):
        return {**found, "tool_choice": wish}
    return {**found, "tool_choice": {"type": "function", "function": {"name": str(wish)}}}


def _format(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """``response_format`` of a provider's wish for JSON."""
    anthropic = (kwargs.get("output_config") or {}).get("format") or kwargs.get("output_format") or {}
    schema = anthropic.get("schema")
    if schema is None and kwargs.get("response_mime_type") == "application/json":
        schema = kwargs.get("response_json_schema") or kwargs.get("response_schema") or "json"
    schema = kwargs.get("format") if schema is None else schema
    if not schema:
        return {}
    if schema == "json":
        return {"response_format": {"type": "json_object"}}
    if not isinstance(schema, Mapping):
        raise UntranslatableError(f"a response schema of type {type(schema).__name__}")
    named = {"name": "answer", "schema": _lower_types(schema), "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": named}}
