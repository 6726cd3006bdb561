"""Chat models of other providers, answered by the policy: ChatAnthropic, ChatGoogleGenerativeAI, ChatOllama and others.

Their requests don't go through the openai SDK, so there is nothing to route. Instead their class's own methods
(``_generate``, ``_agenerate``, ``_stream``, ``_astream``), called inside a scope, hand the messages, tools and settings
to a ChatOpenAI whose requests are routed. Callbacks, retries of the graph and parsers of the app see the model they
always saw. Outside a scope, and for model names that are not the policy's, the original methods run.

By default this is done for the classes of LangChain's provider packages (``langchain_…``); ``delegate(cls)`` adds one.
It refuses to translate what an OpenAI-compatible server has no word for (a provider's own server-side tools): such a
call goes to its provider, and is counted.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from art_backends.capture.patches import PatchSet
from art_backends.capture.scope import Scope, current_scope
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.utils.function_calling import convert_to_openai_tool

_METHODS = ("_generate", "_agenerate", "_stream", "_astream")
_OWN = frozenset({"langchain_core", "langchain_openai", "langchain_classic", "langchain_tests"})
_HOST = "http://policy.invalid/v1"  # never reached: the request is routed

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

_lock = threading.Lock()
_patches = PatchSet()
_done: set[type] = set()
_added: set[type] = set()
_users: list[None] = []


class UntranslatableError(Exception):
    """What an OpenAI-compatible server cannot be asked for; the text names it."""


def install() -> None:
    """Let models of other providers be answered by the policy inside a scope; pairs with ``uninstall()``."""
    with _lock:
        _users.append(None)
    refresh()


def uninstall() -> None:
    """Undo one ``install()``; the last one restores the original methods."""
    with _lock:
        if _users:
            _users.pop()
        if not _users:
            _patches.restore()
            _done.clear()


def delegate(cls: type[BaseChatModel]) -> type[BaseChatModel]:
    """Treat this chat model class, too, as one whose calls the policy answers. Returns the class."""
    _added.add(cls)
    refresh()
    return cls


def refresh() -> None:
    """Take in classes that were imported since the last time; cheap when there are none."""
    if not _users:
        return
    for cls in _subclasses(BaseChatModel):
        if cls not in _done:
            with _lock:
                if _users and cls not in _done:
                    _done.add(cls)
                    if is_delegated(cls):
                        _wrap(cls)


def is_delegated(cls: type) -> bool:
    """Whether the policy answers for models of this class in this module's way."""
    if any(kind in _added for kind in cls.__mro__):
        return True
    root = cls.__module__.partition(".")[0]
    speaks_openai = any(kind.__name__ == "BaseChatOpenAI" for kind in cls.__mro__)
    return root.startswith("langchain_") and root not in _OWN and not speaks_openai


def model_name(model: BaseChatModel) -> str:
    """The name that the app gave its model."""
    told = getattr(model, "model", None) or getattr(model, "model_name", None) or type(model).__name__
    return str(told).removeprefix("models/")


def _subclasses(cls: type) -> Iterator[type]:
    kind: type
    for kind in cls.__subclasses__():
        yield kind
        yield from _subclasses(kind)


def _wrap(cls: type) -> None:
    makers: dict[str, Callable[[Any], Any]] = {
        "_generate": _call,
        "_agenerate": _acall,
        "_stream": _streamed,
        "_astream": _astreamed,
    }
    for name in _METHODS:
        if name in vars(cls):
            _patches.replace(cls, name, makers[name])


def _call(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _generate(self: Any, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
        asked = _asked(self, messages, stop, kwargs)
        if asked is None:
            return original(self, messages, stop, run_manager, **kwargs)
        target, given, ends, options = asked
        return target._generate(given, ends, run_manager, **options)

    return _generate


def _acall(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def _agenerate(self: Any, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
        asked = _asked(self, messages, stop, kwargs)
        if asked is None:
            return await original(self, messages, stop, run_manager, **kwargs)
        target, given, ends, options = asked
        return await target._agenerate(given, ends, run_manager, **options)

    return _agenerate


def _streamed(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _stream(self: Any, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Iterator[Any]:
        asked = _asked(self, messages, stop, kwargs)
        if asked is None:
            yield from original(self, messages, stop, run_manager, **kwargs)
            return
        target, given, ends, options = asked
        yield from target._stream(given, ends, run_manager, **options)

    return _stream


def _astreamed(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def _astream(
        self: Any, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        asked = _asked(self, messages, stop, kwargs)
        if asked is None:
            async for chunk in original(self, messages, stop, run_manager, **kwargs):
                yield chunk
            return
        target, given, ends, options = asked
        async for chunk in target._astream(given, ends, run_manager, **options):
            yield chunk

    return _astream


def _asked(
    model: BaseChatModel, messages: Sequence[BaseMessage], stop: Any, kwargs: Mapping[str, Any]
) -> tuple[Any, list[BaseMessage], list[str] | None, dict[str, Any]] | None:
    """The model that stands in, its messages, stops and options; None if the call is to go where it always went."""
    scope = current_scope()
    if scope is None:
        return None
    name = model_name(model)
    if scope.models and name not in scope.models:
        scope.count("other_model", name)
        return None
    try:
        given = options(model, kwargs)
        ends = given.pop("stop", None)
        return _stand_in(name), plain_messages(messages), list(stop) if stop else ends, given
    except UntranslatableError as error:
        scope.count("not_captured", f"{type(model).__name__}: {error}")
    except Exception as error:  # boundary: capture never breaks the agent; the call goes where it went  # noqa: BLE001
        _troubled(scope, error)
    return None


def _troubled(scope: Scope, error: Exception) -> None:
    scope.count("route_errors", f"{type(error).__name__}: {error}")


@functools.lru_cache(maxsize=256)
def _stand_in(name: str) -> Any:
    from langchain_openai import ChatOpenAI  # noqa: PLC0415 - an app without OpenAI's package needs it only here

    return ChatOpenAI(model=name, base_url=_HOST, api_key="none", use_responses_api=False)  # type: ignore[arg-type]


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
