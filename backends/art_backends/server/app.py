"""The server's app: the guard, the control API, and the proxy's three routes. Nothing else is reachable.

It refuses to hold logic: routes are ``control``'s and the proxy's, admission is ``auth``'s.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from art_backends.proxy.app import Proxy
from art_backends.server.auth import Guard, HostRules, error
from art_backends.server.control import Control, Services


def build(services: Services, proxy: Proxy, hosts: HostRules, *, engine_up: Callable[[], bool]) -> ASGIApp:
    """The ASGI app. ``engine_up`` says whether the engine has its adapters: else calls are told to come again."""

    def away() -> Response | None:
        if engine_up():
            return None
        return error(503, "engine_restarting", "the engine is being restarted; try again", {"retry-after": "1"})

    async def chat(request: Request) -> Response:
        return away() or await proxy.chat_completions(request, request.state.identity)

    async def completions(request: Request) -> Response:
        return away() or await proxy.completions(request, request.state.identity)

    async def models(request: Request) -> Response:
        return await proxy.models(request, request.state.identity)

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    application = Starlette(
        routes=[
            Route("/health", health, methods=["GET"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", models, methods=["GET"]),
            Route("/v1/models/{model}", models, methods=["GET"]),
            *Control(services).routes(),
        ],
        exception_handlers={HTTPException: _refused},
    )
    application.router.redirect_slashes = False
    return Guard(application, services.sessions, hosts)


async def _refused(_: Request, problem: Exception) -> Response:
    """What the router refuses (no such route, wrong method), in the one error envelope."""
    assert isinstance(problem, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(problem.status_code, "error")
    return error(problem.status_code, code, problem.detail, dict(problem.headers or {}))
