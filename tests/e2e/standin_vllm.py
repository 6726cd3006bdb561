"""A program in vLLM's place: takes its command line, speaks its protocol, and answers with the embedded engine.

python standin_vllm.py serve MODEL --served-model-name NAME --max-model-len N (--uds PATH | --port N) [more]
"""

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch
import transformers
import uvicorn
from art_backends.engines.embedded.app import create_app
from art_backends.engines.embedded.core import Engine
from art_backends.engines.embedded.weights import load_base
from starlette.applications import Starlette


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("words", nargs=2)
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--chat-template", type=Path)
    parser.add_argument("--uds")
    parser.add_argument("--port", type=int)
    options, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    folder = Path(options.words[1])
    model = load_base(folder, dtype=torch.float32, device="cpu")
    engine = Engine(model, max_model_len=options.max_model_len)
    app = create_app(
        engine,
        transformers.AutoTokenizer.from_pretrained(folder),
        base_name=options.served_model_name,
        chat_template=None if options.chat_template is None else options.chat_template.read_text(),
        vocab_size=model.config.vocab_size,
        base_root=str(folder),
    )

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with engine:
            yield

    app.router.lifespan_context = lifespan
    where: dict[str, Any] = {"uds": options.uds} if options.uds else {"port": options.port}
    asyncio.run(uvicorn.Server(uvicorn.Config(app, **where, log_level="warning")).serve())


if __name__ == "__main__":
    main()
