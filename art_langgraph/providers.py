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
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

from art_backends.capture.patches import PatchSet
from art_backends.capture.scope import current_scope
from langchain_core.language_models import BaseChatModel, BaseLanguageModel
from langchain_core.messages import BaseMessage

from art_langgraph.translation import UntranslatableError, options, plain_messages

_METHODS = ("_generate", "_agenerate", "_stream", "_astream")
_OWN = frozenset({"langchain_core", "langchain_openai", "langchain_classic", "langchain_tests"})
_HOST = "http://policy.invalid/v1"  # never reached: the request is routed

_lock = threading.Lock()
_patches = PatchSet()
_done: dict[type, bool] = {}  # classes that were looked at, and whether they are wrapped
_added: set[type] = set()
_users: list[None] = []


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
    with _lock:
        _added.add(cls)
        for kind in [kind for kind, wrapped in _done.items() if issubclass(kind, cls) and not wrapped]:
            del _done[kind]
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
                    _done[cls] = _is_named(cls)
                    if _done[cls]:
                        _wrap(cls)


def is_delegated(cls: type) -> bool:
    """Whether the policy answers for models of this class in this module's way."""
    return any(_is_named(kind) for kind in cls.__mro__)


def _is_named(cls: type) -> bool:
    """A class whose methods are replaced; what an app's own class makes of them, by inheriting, stays its own."""
    root = cls.__module__.partition(".")[0]
    speaks_openai = any(kind.__name__ == "BaseChatOpenAI" for kind in cls.__mro__)
    known = issubclass(cls, BaseChatModel) and root.startswith("langchain_") and root not in _OWN
    return cls in _added or (known and not speaks_openai)


def model_name(model: BaseLanguageModel[Any]) -> str:
    """The name that the app gave its model; on Azure that of the deployment, which is what a request names."""
    told = getattr(model, "deployment_name", None) or getattr(model, "model", None)
    told = told or getattr(model, "model_name", None) or type(model).__name__
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
        defines = next(kind for kind in cls.__mro__ if name in vars(kind))
        # what LangChain's own base class defines calls the others; what a delegated base defines is wrapped there
        if defines is cls or not (defines is BaseChatModel or _is_named(defines)):
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
        scope.count("route_errors", f"{type(error).__name__}: {error}")
    return None


@functools.lru_cache(maxsize=256)
def _stand_in(name: str) -> Any:
    from langchain_openai import ChatOpenAI  # noqa: PLC0415 - an app without OpenAI's package needs it only here

    return ChatOpenAI(model=name, base_url=_HOST, api_key="none", use_responses_api=False)  # type: ignore[arg-type]
