"""The guard in front of every route: Host, Origin, framing, the allow-list of paths, the bearer token.

It looks at ``scope["path"]`` and the raw headers only; nothing is derived from a URL that a Host header could bend.
A path without a door is 404 before anything else is looked at, so that no route of the engine is reachable. Which
rollout a call belongs to is decided by the token alone: the one in the path, else the first of the headers' that is
known here (``Authorization``, ``x-api-key``, ``api-key``); naming another one beside it is a 400. A request that says
it outlived its rollout's scope is admitted as an agent's call, of no rollout.

It refuses to log tokens, paths that hold one, or headers.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from art_backends.errors import StoreError
from art_backends.proxy.doors import Doors
from art_backends.proxy.identity import Identity
from art_backends.server.sessions import Sessions

log = logging.getLogger(__name__)

CONTROL = "/control/v1/"
METRICS = "/metrics"  # as the control API: the admin's
_TOKEN_PATH = re.compile(r"/r/(?P<token>[A-Za-z0-9_-]{16,200})(?P<rest>/(v1|openai)/.*)\Z")
_KEY_HEADERS = ("x-api-key", "api-key")  # Anthropic's and Azure's; the former stands before the latter
_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:(?P<port>[0-9]{1,5}))?\Z")
_ORIGIN = re.compile(r"https?://(?P<host>[^/?#@\s]+)\Z")
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
WILDCARDS = frozenset({"0.0.0.0", "::", ""})  # noqa: S104  compared with, not bound


def error(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """The one error envelope: OpenAI's, which is also the control API's."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return JSONResponse(body, status, headers=headers)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address that is bound."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class HostRules:
    """Which Host headers are ours: loopback's names, the bound host; bound to all addresses, any address literal."""

    def __init__(self, bound: str) -> None:
        self._names = set(LOOPBACK)
        self._any_literal = bound in WILDCARDS
        if self._any_literal:
            self._names.add(socket.gethostname().lower())
        else:
            self._names.add(bound.lower())

    def allows(self, header: str) -> bool:
        found = _HOST.match(header)
        if found is None:
            return False
        name = found["name"].strip("[]").lower()
        if name in self._names:
            return True
        if not self._any_literal:
            return False
        try:  # a literal cannot be rebound by a foreign name server
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


class Guard:
    """ASGI middleware; sets ``scope["state"]["identity"]``."""

    def __init__(self, app: ASGIApp, sessions: Sessions, hosts: HostRules, doors: Doors) -> None:
        self._app = app
        self._sessions = sessions
        self._hosts = hosts
        self._doors = doors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        refusal = await self._admit(scope)
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await refusal(scope, receive, send)

    async def _admit(self, scope: Scope) -> Response | None:
        headers = _Headers(scope)
        path: str = scope["path"]
        refusal = self._check_framing(headers) or self._check_host(headers)
        if refusal is not None:
            return refusal
        if path == "/health":
            return None
        in_path = _TOKEN_PATH.match(path)
        if in_path is not None:
            path = in_path["rest"]
            scope["path"] = path
            scope["raw_path"] = path.encode()
        control = (path.startswith(CONTROL) or path == METRICS) and in_path is None
        dialect = self._doors.dialect(path)
        if not control and dialect is None:
            return error(404, "not_found", "there is no such route here")
        refusal = await self._check_token(scope, headers, in_path["token"] if in_path else None, control=control)
        if refusal is None or dialect is None:
            return refusal
        told = dialect.refused(refusal.status_code, bytes(refusal.body))
        kept = {name: value for name, value in refusal.headers.items() if name != "content-length"}
        return Response(told, refusal.status_code, kept)

    def _check_framing(self, headers: _Headers) -> JSONResponse | None:
        close = {"connection": "close"}
        if headers.count("content-length") and headers.count("transfer-encoding"):
            return error(400, "bad_framing", "Content-Length and Transfer-Encoding exclude each other", close)
        for name in ("host", "content-length", "transfer-encoding", "authorization", *_KEY_HEADERS, "x-art-rollout-id"):
            if headers.count(name) > 1:
                return error(400, "bad_framing", f"more than one header {name}", close)
        return None

    def _check_host(self, headers: _Headers) -> JSONResponse | None:
        if not self._hosts.allows(headers.get("host") or ""):
            return error(421, "wrong_host", "this server does not answer for that Host")
        origin = headers.get("origin")
        if origin is not None:
            found = _ORIGIN.match(origin)
            if found is None or not self._hosts.allows(found["host"]):
                return error(403, "wrong_origin", "requests of foreign web pages are refused")
        return None

    async def _check_token(
        self, scope: Scope, headers: _Headers, path_token: str | None, *, control: bool
    ) -> JSONResponse | None:
        scheme, _, bearer = (headers.get("authorization") or "").partition(" ")
        keys = [bearer.strip()] if scheme.lower() == "bearer" else []
        if not control:
            keys += [(headers.get(name) or "").strip() for name in _KEY_HEADERS]
        keys = [key for key in keys if key]
        if not keys and path_token is None:
            return error(401, "no_token", f"a key is needed, {_WAY}; {_where(control=control)}", _CHALLENGE)
        identity: Identity | None = None
        known: list[Identity] = []
        for key in keys if path_token is None else [path_token, *keys]:
            try:
                found = await self._sessions.identify(key)
            except StoreError as problem:
                if identity is not None:  # a key beside one that is known matters only if it is known, too
                    continue
                log.error("a token could not be looked up: %s", problem)
                return error(503, "store_unavailable", "the token cannot be looked up now", {"retry-after": "1"})
            if key == path_token and found is None:
                break
            if found is not None:
                identity = identity or found
                known.append(found)
        if identity is None:
            message = f"this key is not known here; {_where(control=control)}"
            return error(401, "unknown_token", message, _CHALLENGE)
        refusal = self._check_identity(headers, identity, known)
        if refusal is None and control and identity.kind != "admin":
            refusal = error(403, "admin_only", "the control API and the metrics need the admin token")
        if identity.kind == "rollout" and headers.get("x-art-scope-ended") == "1":
            # What outlived its scope (a thread, a timer) is not the rollout's any more, though that may still be open.
            identity = Identity("agent", policy=identity.policy)
        scope.setdefault("state", {})["identity"] = identity
        return refusal

    def _check_identity(self, headers: _Headers, identity: Identity, known: list[Identity]) -> JSONResponse | None:
        mine = identity.rollout.id if identity.rollout is not None else None
        named = headers.get("x-art-rollout-id")
        if named is not None and named != mine:
            return error(400, "rollout_conflict", "the token belongs to another rollout than x-art-rollout-id names")
        # a key that is none of ours does not matter beside one that is: it is the app's own
        if any(other.owner != identity.owner for other in known):
            return error(400, "rollout_conflict", "the tokens in the path and the headers belong to different ones")
        return None


_CHALLENGE = {"www-authenticate": "Bearer"}
_WAY = "as Authorization: Bearer KEY or x-api-key: KEY (OPENAI_API_KEY or ANTHROPIC_API_KEY, or the SDK's api_key)"


def _where(*, control: bool) -> str:
    """Which file has the key, for those who may read it. No path: who asks is not known."""
    whose, kind = ("the control API's", "admin") if control else ("an app's", "agent")
    return f"{whose} key is in the file {kind}.token of the run folder that is served here"


class _Headers:
    """Raw headers of a request, by lower-case name."""

    def __init__(self, scope: Scope) -> None:
        self._values: dict[str, list[str]] = {}
        pairs: list[tuple[bytes, bytes]] | Any = scope["headers"]
        for name, value in pairs:
            self._values.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))

    def count(self, name: str) -> int:
        return len(self._values.get(name, ()))

    def get(self, name: str) -> str | None:
        values = self._values.get(name)
        return values[0] if values else None
