"""A byte-level ChatML tokenizer made on the spot, and an app around an engine that says what it is told to say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from art_backends.engines.embedded.app import create_app
from art_backends.engines.embedded.requests import Generation, Token
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tokenizer(template: str | None = CHATML, *, tags: bool = False) -> Any:
    """256 bytes as tokens, a few merges, ChatML's control tokens; with ``tags`` the tool-call tags are tokens too."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("o", "o")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    if tags:
        tokenizer.add_tokens(
            [AddedToken(tag, special=False, normalized=False) for tag in ("<tool_call>", "</tool_call>")]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", bos_token="<|endoftext|>")
    fast.chat_template = template
    return fast


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="session")
def new_tokenizer() -> Callable[..., Any]:
    return make_tokenizer


class ScriptedEngine:
    """Answers row after row with given ids: for what a random model cannot be made to say, and for its faults.

    ``answers``: what the next rows say. A row ends by a stop token, by its budget, or where its script ends
    ("stop"); an exception in a script is raised there; ``hold`` keeps the row open without an end.
    """

    max_model_len = 512
    healthy = True
    failure: str | None = None

    def __init__(self) -> None:
        self.answers: list[Sequence[Any]] = []
        self.seen: list[Generation] = []
        self.cancelled = 0
        self.waiting = asyncio.Event()
        self.loaded: dict[str, Path] = {"policy@1": Path("/versions/policy@1")}
        self.refuse: Exception | None = None

    def adapters(self) -> list[str]:
        return list(self.loaded)

    def load_adapter(self, name: str, path: Path) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.loaded[name] = path

    def unload_adapter(self, name: str) -> None:
        del self.loaded[name]

    def metrics(self) -> dict[str, Any]:
        return {"running": 0, "waiting": 0, "tokens_sampled": 7}

    async def submit(self, generation: Generation) -> AsyncIterator[Token]:
        self.seen.append(generation)
        script = list(self.answers.pop(0))
        try:
            for count, item in enumerate(script, start=1):
                if isinstance(item, Exception):
                    raise item
                if item == "hold":
                    self.waiting.set()
                    await asyncio.Event().wait()
                if item in ("abort", "error", "vanish"):
                    if item != "vanish":
                        yield Token(id=0, logprob=0.0, finish=item)
                    return
                stop = item in generation.stop_token_ids or count == len(script)
                finish = "stop" if stop else "length" if count == generation.max_tokens else None
                top = tuple((item + step, -0.5 - step) for step in range(generation.top_logprobs))
                yield Token(id=item, logprob=-0.5, top=top, finish=finish)
                if finish is not None:
                    return
        except (GeneratorExit, asyncio.CancelledError):
            self.cancelled += 1
            raise


@pytest.fixture
def scripted() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def say(scripted: ScriptedEngine, tokenizer: Any) -> Callable[..., list[int]]:
    """Lets the next row say a text and end its turn; gives the ids."""

    def tell(text: str, *, end: bool = True) -> list[int]:
        ids = tokenizer.encode(text, add_special_tokens=False) + ([tokenizer.eos_token_id] if end else [])
        scripted.answers.append(ids)
        return ids

    return tell


@pytest.fixture
def app(scripted: ScriptedEngine, tokenizer: Any) -> Any:
    return create_app(scripted, tokenizer, base_name="base", versions={"version": "1"})


@pytest.fixture
async def http(app: Any) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://engine") as client:
        yield client


@pytest.fixture
def sdk(http: httpx2.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key="none", base_url="http://engine/v1", http_client=http, max_retries=0)
