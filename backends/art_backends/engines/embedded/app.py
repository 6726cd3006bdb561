"""The embedded engine's HTTP face: the routes of the engine protocol, as stock vLLM answers them.

``create_app`` gives a Starlette app around a running engine; whoever creates the engine starts and closes it. The
app is for the loopback or a Unix socket: it knows no tokens and no users, and its control routes are open to whoever
reaches it.

It refuses bodies beyond 32 MiB (413) and answers every error in OpenAI's envelope.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from art_backends.engines.embedded.chat import Chat
from art_backends.engines.embedded.completions import Completion
from art_backends.engines.embedded.protocol import (
    ApiError,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    LoadAdapterBody,
    TokenizeBody,
    UnloadAdapterBody,
    parse,
)
from art_backends.engines.embedded.render import ChatTemplate
from art_backends.engines.embedded.replies import EventReply, JsonReply, error_response, json_response, read_json
from art_backends.engines.embedded.service import Service
from art_backends.engines.embedded.text import Vocabulary

Reply = Response | JsonReply | EventReply


def create_app(
    engine: Any,
    tokenizer: Any,
    *,
    base_name: str,
    chat_template: str | None = None,
    vocab_size: int | None = None,
    eos_token_ids: Iterable[int] = (),
    base_root: str | None = None,
    versions: Mapping[str, str] | None = None,
) -> Starlette:
    """An app that answers for ``engine`` (a started ``core.Engine``) with ``tokenizer`` (a fast transformers one).

    ``base_name``: the model name under which the base, without adapter, answers. ``chat_template``: text that wins
    over the tokenizer's own. ``vocab_size``: rows of the model's embedding. ``eos_token_ids``: those of the model's
    generation settings, beside the tokenizer's. ``base_root``: where the base came from. ``versions``: what
    ``/version`` tells. Raises TemplateError if there is no chat template.
    """
    vocabulary = Vocabulary(tokenizer, size=vocab_size, eos_token_ids=eos_token_ids)
    face = _Face(Service(engine, vocabulary, ChatTemplate(tokenizer, chat_template), base_name), base_root, versions)
    routes = [
        Route("/v1/chat/completions", _guarded(face.chat), methods=["POST"]),
        Route("/v1/completions", _guarded(face.completions), methods=["POST"]),
        Route("/v1/models", _guarded(face.models), methods=["GET"]),
        Route("/v1/load_lora_adapter", _guarded(face.load_adapter), methods=["POST"]),
        Route("/v1/unload_lora_adapter", _guarded(face.unload_adapter), methods=["POST"]),
        Route("/tokenize", _guarded(face.tokenize), methods=["POST"]),
        Route("/detokenize", _guarded(face.detokenize), methods=["POST"]),
        Route("/tokenizer_info", _guarded(face.tokenizer_info), methods=["GET"]),
        Route("/health", _guarded(face.health), methods=["GET"]),
        Route("/version", _guarded(face.version), methods=["GET"]),
        Route("/metrics.json", _guarded(face.metrics), methods=["GET"]),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _http_error})


def create_tokenizer_app(
    tokenizer: Any,
    *,
    max_model_len: int,
    chat_template: str | None = None,
    vocab_size: int | None = None,
    eos_token_ids: Iterable[int] = (),
    versions: Mapping[str, str] | None = None,
) -> tuple[Starlette, ChatTemplate]:
    """What a model's files alone can answer, for an engine elsewhere that does not tell it: tokenizer and template.

    Also the template in force. The parameters are ``create_app``'s.
    """
    vocabulary = Vocabulary(tokenizer, size=vocab_size, eos_token_ids=eos_token_ids)
    template = ChatTemplate(tokenizer, chat_template)
    face = _Face(Service(_NoEngine(max_model_len), vocabulary, template, ""), None, versions)
    routes = [
        Route("/tokenize", _guarded(face.tokenize), methods=["POST"]),
        Route("/detokenize", _guarded(face.detokenize), methods=["POST"]),
        Route("/tokenizer_info", _guarded(face.tokenizer_info), methods=["GET"]),
        Route("/health", _guarded(face.health), methods=["GET"]),
        Route("/version", _guarded(face.version), methods=["GET"]),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _http_error}), template


@dataclass(frozen=True)
class _NoEngine:
    """In an engine's place, where nothing is sampled."""

    max_model_len: int
    healthy: bool = True


class _Face:
    """The routes' endpoints."""

    def __init__(self, service: Service, base_root: str | None, versions: Mapping[str, str] | None) -> None:
        self._service = service
        self._base_root = base_root or service.base_name
        self._versions = dict(versions or {})

    async def chat(self, request: Request) -> Reply:
        body = parse(ChatBody, await read_json(request))
        chat = Chat(self._service, body)
        return EventReply(chat.chunks()) if body.stream else JsonReply(chat.reply)

    async def completions(self, request: Request) -> Reply:
        body = parse(CompletionBody, await read_json(request))
        completion = Completion(self._service, body)
        return EventReply(completion.chunks()) if body.stream else JsonReply(completion.reply)

    async def models(self, request: Request) -> Reply:
        limit = self._service.engine.max_model_len
        base = {"id": self._service.base_name, "root": self._base_root, "parent": None}
        data = [base]
        for name in sorted(self._service.engine.adapters()):
            data.append({"id": name, "root": name, "parent": self._service.base_name})
        common = {"object": "model", "created": 0, "owned_by": "art-inplace", "max_model_len": limit}
        return json_response({"object": "list", "data": [{**common, **model} for model in data]})

    async def load_adapter(self, request: Request) -> Reply:
        body = parse(LoadAdapterBody, await read_json(request))
        if body.lora_name == self._service.base_name or body.lora_name in self._service.engine.adapters():
            raise ApiError(f"The lora adapter '{body.lora_name}' has already been loaded.", param="lora_name")
        # reading and checking its files takes a while: not on the event loop
        await asyncio.to_thread(self._service.engine.load_adapter, body.lora_name, Path(body.lora_path))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload_adapter(self, request: Request) -> Reply:
        body = parse(UnloadAdapterBody, await read_json(request))
        if body.lora_name not in self._service.engine.adapters():
            raise ApiError(f"The lora adapter '{body.lora_name}' cannot be found.", status=404, param="lora_name")
        self._service.engine.unload_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def tokenize(self, request: Request) -> Reply:
        body = parse(TokenizeBody, await read_json(request))
        vocabulary = self._service.vocabulary
        if body.messages is not None:
            ids = self._service.render(body.messages, body)
        else:
            ids = vocabulary.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
        strings = [vocabulary.piece_str(index) for index in ids] if body.return_token_strs else None
        limit = self._service.engine.max_model_len
        return json_response({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings})

    async def detokenize(self, request: Request) -> Reply:
        body = parse(DetokenizeBody, await read_json(request))
        ids = self._service.check_ids(body.tokens, "tokens") if body.tokens else []
        return json_response({"prompt": self._service.vocabulary.decode(ids)})

    async def tokenizer_info(self, request: Request) -> Reply:
        vocabulary = self._service.vocabulary
        tokenizer = vocabulary.tokenizer
        return json_response(
            {
                "tokenizer_class": type(tokenizer).__name__,
                "vocab_size": vocabulary.size,
                "special_tokens": vocabulary.control_strings,
                "eos_token_ids": sorted(vocabulary.eos_token_ids),
                "bos_token": tokenizer.bos_token,
                "eos_token": tokenizer.eos_token,
                "chat_template": self._service.template.source,
                "model_max_length": self._service.engine.max_model_len,
            }
        )

    async def health(self, request: Request) -> Reply:
        if not self._service.engine.healthy:
            raise ApiError(f"the engine has ended: {self._service.engine.failure or 'closed'}", status=503)
        return json_response({"status": "ok"})

    async def version(self, request: Request) -> Reply:
        return json_response(self._versions)

    async def metrics(self, request: Request) -> Reply:
        return json_response(self._service.engine.metrics())


def _guarded(endpoint: Callable[[Request], Awaitable[Reply]]) -> Callable[[Request], Awaitable[Any]]:
    async def answer(request: Request) -> Reply:
        try:
            return await endpoint(request)
        except Exception as error:  # noqa: BLE001 - boundary: every failure of a request becomes its error reply
            return error_response(error)

    return answer


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    words = {404: "there is no such route", 405: "this route does not take that method"}
    said = words.get(status, "the request failed")
    response = error_response(ApiError(f"{request.method} {request.url.path}: {said}", status=status))
    if isinstance(error, HTTPException) and error.headers:
        response.headers.update(error.headers)
    return response
