"""``python -m art_backends.worker``: the embedded engine and the trainer on one Unix socket.

With ``--no-engine`` the trainer alone, and what the model's files tell of its tokenizer: for an engine elsewhere. No
weights are read before the first step then.

Writes one JSON line to standard output when it answers (``{"ready": true, …}``) or cannot start
(``{"ready": false, "type": …, "message": …}``, exit code 3), and ends when its standard input does: a worker never
outlives its server. It refuses to be started by hand without a socket, and it knows nothing of stores and tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from art_backends import stacks

stacks.on_request()  # before what takes seconds to import: a signal would end the process

import torch  # noqa: E402
import transformers  # noqa: E402
import uvicorn  # noqa: E402
from starlette.applications import Starlette  # noqa: E402

from art_backends.child import when_input_ends  # noqa: E402
from art_backends.engines.embedded.app import create_app, create_tokenizer_app  # noqa: E402
from art_backends.engines.embedded.convert import gguf_to_safetensors  # noqa: E402
from art_backends.engines.embedded.core import Engine  # noqa: E402
from art_backends.engines.embedded.weights import load_base  # noqa: E402
from art_backends.errors import ArtError, TemplateError  # noqa: E402
from art_backends.models import ResolvedModel, resolve  # noqa: E402
from art_backends.redaction import Redactor, guard_logs  # noqa: E402
from art_backends.training.trainer import Trainer  # noqa: E402
from art_backends.worker.jobs import Jobs  # noqa: E402
from art_backends.worker.memory import give_back  # noqa: E402

log = logging.getLogger("art_backends.worker")

KEEP_ALIVE_SECONDS = 120  # of an idle connection; the server, however busy, gives it up long before: none is closed
# under a request


def main() -> int:
    """Serve until standard input ends; returns the exit code."""
    options = _parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    guard_logs(Redactor())
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        app, said = _build(options)
    except ArtError as error:
        _announce({"ready": False, "type": type(error).__name__, "message": str(error)})
        return 3
    asyncio.run(_serve(app, options.uds, said))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m art_backends.worker")
    parser.add_argument("--uds", required=True, type=Path, help="Unix socket to listen on")
    parser.add_argument("--base-model", required=True, help="local folder, hub name or package:NAME==VERSION")
    parser.add_argument("--name", required=True, help="name of the policy that is trained")
    parser.add_argument("--versions", required=True, type=Path, help="folder of its adapter versions")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (0: all cores)")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--chat-template", type=Path)
    parser.add_argument("--no-engine", action="store_true", help="trainer and tokenizer only")
    parser.add_argument("--release", action="store_true", help="give back the device's memory after each step")
    return parser


def _build(options: argparse.Namespace) -> tuple[Starlette, dict[str, Any]]:
    """The app of engine and trainer, and what the ready line says of them."""
    torch.set_num_threads(options.threads or _cores())
    template = None
    if options.chat_template is not None:
        try:
            template = options.chat_template.read_text()
        except OSError as error:
            raise TemplateError(f"chat template {options.chat_template}: cannot be read: {error.strerror}") from None
    base = resolve(options.base_model, gguf_to_safetensors)
    log.info("base model %s: %s, digest %s", options.base_model, base.source, base.digest)
    trainer = Trainer(
        base.path,
        policy=options.name,
        versions=options.versions,
        dtype=options.dtype,
        device=options.device,
        base_digest=base.digest,
    )
    jobs = Jobs(trainer, trainer.release if options.release else give_back)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base.path, local_files_only=True, trust_remote_code=False)
    app, engine, said = (_without_engine if options.no_engine else _with_engine)(options, base, tokenizer, template)
    app.router.routes.extend(jobs.routes())

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with engine:
            try:
                yield
            finally:
                await jobs.close()

    app.router.lifespan_context = lifespan
    return app, {"ready": True, "digest": base.digest, "model": str(base.path), **said}


_Made = tuple[Starlette, contextlib.AbstractAsyncContextManager[Any], dict[str, Any]]


def _with_engine(options: argparse.Namespace, base: ResolvedModel, tokenizer: Any, template: str | None) -> _Made:
    """The app of the engine, the engine, and what the ready line says of it."""
    model = load_base(base.path, dtype=getattr(torch, options.dtype), device=options.device)
    engine = Engine(model, max_model_len=options.max_model_len)
    app = create_app(
        engine,
        tokenizer,
        base_name=options.base_model,
        chat_template=template,
        vocab_size=model.get_input_embeddings().num_embeddings,  # type: ignore[arg-type]  # an nn.Embedding
        eos_token_ids=_eos(model.generation_config),
        base_root=str(base.path),
        versions=_versions(),
    )
    return app, engine, {"max_model_len": engine.max_model_len}


def _without_engine(options: argparse.Namespace, base: ResolvedModel, tokenizer: Any, template: str | None) -> _Made:
    """The same where the engine is elsewhere; the ready line has what that one must be started with."""
    config = transformers.AutoConfig.from_pretrained(base.path, local_files_only=True, trust_remote_code=False)
    text = config.get_text_config()
    try:
        generation = transformers.GenerationConfig.from_pretrained(base.path, local_files_only=True)
    except OSError:  # it has none
        generation = None
    longest = min(options.max_model_len, getattr(text, "max_position_embeddings", None) or options.max_model_len)
    app, in_force = create_tokenizer_app(
        tokenizer,
        max_model_len=longest,
        chat_template=template,
        vocab_size=text.vocab_size,
        eos_token_ids=_eos(generation) or _eos(text),
        versions=_versions(),
    )
    said = {"max_model_len": longest, "chat_template": in_force.source, "own_template": in_force.is_the_models}
    return app, contextlib.nullcontext(), said


def _versions() -> dict[str, str]:
    return {"torch": torch.__version__, "transformers": transformers.__version__}


def _cores() -> int:
    """Cores that this process may use: fewer than the machine's in a container or under taskset."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _eos(settings: Any) -> list[int]:
    """Ids of the tokens that end an answer, by a model's settings."""
    ids = getattr(settings, "eos_token_id", None)
    return [ids] if isinstance(ids, int) else list(ids or [])


class _Server(uvicorn.Server):
    """Says when it answers; signals are left to their defaults (standard input decides)."""

    def __init__(self, config: uvicorn.Config, said: dict[str, Any]) -> None:
        super().__init__(config)
        self._said = said

    async def startup(self, sockets: list[Any] | None = None) -> None:
        await super().startup(sockets)
        _announce(self._said)


async def _serve(app: Starlette, uds: Path, said: dict[str, Any]) -> None:
    config = uvicorn.Config(
        app,
        uds=str(uds),
        http="httptools",
        access_log=False,
        log_config=None,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=5,
    )
    server = _Server(config, said)
    when_input_ends(asyncio.get_running_loop(), lambda: setattr(server, "should_exit", True))
    await server.serve()


def _announce(said: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
