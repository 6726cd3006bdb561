"""The embedded engine with a tiny random model, always the same one, as a process of its own on a Unix socket.

``python -m tests.backends.server.tiny_engine --uds SOCKET``; says "ready" when it listens, ends with its input.
"""

import argparse
import os
import sys
import threading
from typing import Any

import torch
import uvicorn
from art_backends.engines.embedded.app import create_app
from art_backends.engines.embedded.core import Engine
from art_backends.engines.embedded.render import HERMES_PATH

from tests.backends.engines.conftest import make_model
from tests.backends.engines.embedded.conftest import make_tokenizer

LIMIT = 512


class Server(uvicorn.Server):
    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        sys.stdout.write("ready\n")
        sys.stdout.flush()


def end_with_parent() -> None:
    while sys.stdin.buffer.read(1):
        pass
    os._exit(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds", required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    threading.Thread(target=end_with_parent, daemon=True).start()
    tokenizer = make_tokenizer(HERMES_PATH.read_text())
    engine = Engine(make_model(vocab_size=len(tokenizer)), max_model_len=LIMIT)
    engine.start()
    app = create_app(engine, tokenizer, base_name="base", vocab_size=len(tokenizer))
    Server(uvicorn.Config(app, uds=given.uds, log_level="warning", lifespan="off")).run()
