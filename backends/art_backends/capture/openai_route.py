"""The openai SDK's route: inside a scope its requests go to the proxy, with the rollout's token and through our client.

The place is ``_send_request``, where the SDK hands a built request to HTTP: below it everything of the SDK stays as it
is (retries and their count, timeouts, streaming, raw responses, errors), above it every way of calling has come
together, clients built at import or per call, with whatever ``base_url``, Azure's too. openai before 2 has no such
method; there ``request`` runs on a shallow copy of the client whose HTTP client is a stand-in.

It refuses to forward anything that identifies the user: headers go by a list of what is allowed, never by a list of
what is secret. It refuses other paths than chat completions, completions, responses and models: those go where they
went, and are counted. Redirects of the user's HTTP client, its event hooks and its proxies do not apply on this way.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from openai import AsyncOpenAI, OpenAI
from openai._base_client import AsyncAPIClient, SyncAPIClient

from art_backends.capture.clients import Clients, library_of
from art_backends.capture.patches import PatchSet
from art_backends.capture.scope import NodeContext, Scope, count_outside, current_node, current_scope

CLIENTS = Clients()

# What of the app's headers may reach the proxy; x-stainless-* carries the SDK's retry count and raw-response mark.
_ALLOWED = frozenset(
    {
        "accept",
        "accept-encoding",
        "content-type",
        "idempotency-key",
        "openai-beta",
        "traceparent",
        "tracestate",
        "user-agent",
    }
)
_ALLOWED_PREFIX = "x-stainless-"
_SEEN = "art_seen"  # among a request's extensions: decided about; _ELSEWHERE if it goes where it went
_ELSEWHERE = "elsewhere"
_ALLOWED_QUERY = frozenset({"after", "limit", "order", "stream", "starting_after", "include", "include[]"})

_AZURE = re.compile(r"(?:^|.*?/)openai/deployments/([^/]+)/(chat/completions|completions)$")
_POST = re.compile(r"(?:^|.*?/)(chat/completions|completions|responses(?:/[^/]+/cancel)?)$")
_GET = re.compile(r"(?:^|.*?/)(models(?:/[^/]+)?|responses/[^/]+(?:/input_items)?)$")


def match(method: str, path: str) -> tuple[str, str | None] | None:
    """Path below the API root and, on Azure, the deployment; None for a path that is not routed.

    >>> match("POST", "/openai/deployments/gpt/chat/completions")
    ('chat/completions', 'gpt')
    """
    if method == "POST" and (found := _AZURE.match(path)):
        return found[2], found[1]
    pattern = {"POST": _POST, "GET": _GET}.get(method)
    found = pattern.match(path) if pattern else None
    return (found[1], None) if found else None


def headers_for(scope: Scope, node: NodeContext | None, headers: Any) -> list[tuple[str, str]]:
    """Headers of the routed request: what is allowed of the app's, the token, and the node (percent-encoded)."""
    kept = [
        (name, value)
        for name, value in headers.multi_items()
        if name.lower() in _ALLOWED or name.lower().startswith(_ALLOWED_PREFIX)
    ]
    kept.append(("authorization", f"Bearer {scope.token}"))
    if scope.ended:
        kept.append(("x-art-scope-ended", "1"))
    if node is not None:
        for field in ("name", "step", "checkpoint_ns", "task_id", "node_run_id", "run_id", "agent"):
            value = getattr(node, field)
            if value is not None:
                header = "x-art-node" if field == "name" else "x-art-" + field.replace("_", "-")
                kept.append((header, quote(str(value), safe="")))
    return kept


def rewrite(scope: Scope, request: Any, body: bytes) -> Any | None:
    """The same request to the proxy, of the same library; None if it is not ours to route (counted)."""
    found = match(request.method, request.url.path)
    if found is None:
        scope.count("not_captured", f"{request.method} {request.url.path}")
        return None
    path, deployment = found
    if scope.models or deployment is not None:
        data = _json_object(body)
        model = deployment or data.get("model") or (path.partition("/")[2] if path.startswith("models/") else None)
        if scope.models and model not in scope.models:
            scope.count("other_model", str(model))
            return None
        if deployment is not None:
            body = json.dumps({**data, "model": deployment}, ensure_ascii=False).encode()
    query = [pair for pair in parse_qsl(request.url.query.decode("ascii")) if pair[0] in _ALLOWED_QUERY]
    url = f"{scope.base_url}/{path}" + (f"?{urlencode(query)}" if query else "")
    extensions = {"timeout": request.extensions["timeout"]} if "timeout" in request.extensions else {}
    routed = library_of(request).Request(
        request.method,
        url,
        headers=headers_for(scope, current_node(), request.headers),
        content=body if request.method == "POST" else None,
        extensions=extensions,
    )
    scope.count("after_end" if scope.ended else "routed")
    return routed


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        data = json.loads(body) if body else {}
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def _entered() -> Scope | None:
    """The scope to route for, its node told of the request."""
    scope, node = current_scope(), current_node()
    if scope is not None and node is not None:
        node.requests += 1
    return scope


def _route_sync(request: Any) -> tuple[Any, Any] | None:
    """Our client and the routed request, or None to let the app's own client send it."""
    scope = _entered()
    if scope is None:
        return None
    try:
        client = CLIENTS.sync(library_of(request), scope.base_url.startswith("https:"))
        routed = rewrite(scope, request, request.read())
    except Exception as error:  # boundary: capture never breaks the agent; the call goes where it went  # noqa: BLE001
        scope.count("route_errors", f"{type(error).__name__}: {error}")
        return None
    return None if routed is None else (client, routed)


async def _route_async(request: Any) -> tuple[Any, Any] | None:
    scope = _entered()
    if scope is None:
        return None
    try:
        client = CLIENTS.asynchronous(library_of(request), scope.base_url.startswith("https:"))
        routed = rewrite(scope, request, await request.aread())
    except Exception as error:  # boundary: capture never breaks the agent; the call goes where it went  # noqa: BLE001
        scope.count("route_errors", f"{type(error).__name__}: {error}")
        return None
    return None if routed is None else (client, routed)


def provider_of(error: BaseException) -> str | None:
    """The host of the provider that an error of the SDK comes from; None if its request was the policy's."""
    try:
        request = getattr(error, "request", None)
        return str(request.url.host) if request is not None and request.extensions.get(_SEEN) == _ELSEWHERE else None
    except (RuntimeError, AttributeError):  # no request was made
        return None


def _first_sight(request: Any) -> bool:
    """Whether to decide about this request here: the outer class's method calls the inner one's, both are patched."""
    if current_scope() is None or _SEEN in request.extensions:
        return False
    request.extensions[_SEEN] = True
    return True


def _marked(request: Any) -> Any:
    """The request, known as one that goes to its provider."""
    if current_scope() is not None:
        request.extensions[_SEEN] = _ELSEWHERE
    return request


def _send_sync(original: Callable[..., Any], inner: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def _send_request(self: Any, request: Any, *, stream: bool, **kwargs: Any) -> Any:
        if inner and current_scope() is None:
            count_outside()
        if _first_sight(request) and (route := _route_sync(request)) is not None:
            client, routed = route
            return client.send(routed, stream=stream)
        return original(self, _marked(request), stream=stream, **kwargs)

    return _send_request


def _send_async(original: Callable[..., Awaitable[Any]], inner: bool) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(original)
    async def _send_request(self: Any, request: Any, *, stream: bool, **kwargs: Any) -> Any:
        if inner and current_scope() is None:
            count_outside()
        if _first_sight(request) and (route := await _route_async(request)) is not None:
            client, routed = route
            return await client.send(routed, stream=stream)
        return await original(self, _marked(request), stream=stream, **kwargs)

    return _send_request


class _StandIn:
    """In the place of the app's HTTP client for one request: sends by our route, else as the app's would."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


class _SyncStandIn(_StandIn):
    def send(self, request: Any, *, stream: bool = False, **kwargs: Any) -> Any:
        route = _route_sync(request)
        if route is None:
            return self._client.send(_marked(request), stream=stream, **kwargs)
        return route[0].send(route[1], stream=stream)


class _AsyncStandIn(_StandIn):
    async def send(self, request: Any, *, stream: bool = False, **kwargs: Any) -> Any:
        route = await _route_async(request)
        if route is None:
            return await self._client.send(_marked(request), stream=stream, **kwargs)
        return await route[0].send(route[1], stream=stream)


def _request(stand_in: type[_StandIn]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For openai 1: run the SDK's ``request`` on a copy of the client that has our stand-in."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def request(self: Any, *args: Any, **kwargs: Any) -> Any:
            if current_scope() is None:
                count_outside()
                return original(self, *args, **kwargs)
            client = copy.copy(self)
            client._client = stand_in(self._client)
            return original(client, *args, **kwargs)

        return request

    return make


def install(patches: PatchSet) -> None:
    """Route the SDK's requests of code inside a scope."""
    if "_send_request" not in vars(SyncAPIClient):
        patches.replace(SyncAPIClient, "request", _request(_SyncStandIn))
        patches.replace(AsyncAPIClient, "request", _request(_AsyncStandIn))
        return
    # Newer SDKs sign in (workload identity) in the outer class, before the inner one sends: both are patched, so
    # that nothing of it happens for a routed request.
    places: list[tuple[type, Callable[..., Any], bool]] = [
        (SyncAPIClient, _send_sync, True),
        (OpenAI, _send_sync, False),
        (AsyncAPIClient, _send_async, True),
        (AsyncOpenAI, _send_async, False),
    ]
    for owner, make, inner in places:
        if "_send_request" in vars(owner):
            patches.replace(owner, "_send_request", functools.partial(make, inner=inner))
