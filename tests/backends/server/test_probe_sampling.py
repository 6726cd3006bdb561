"""What an engine samples with by itself is found out by what it does, and named from the model's file."""

import asyncio
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from art_backends.errors import EngineError
from art_backends.proxy.engine import Engine
from art_backends.server import probe_sampling

LOGITS = {"red": 2.0, "blue": 1.0, "green": 0.5, "grey": 0.0, "black": -1.0}


class Server:
    """Tells the likeliest tokens of fixed logits, at the temperature that was said or at its own; knows top_k."""

    def __init__(self, root: str = "", **own: float) -> None:
        self.root = root
        self.own = own
        self.status = 200

    async def chat(self, body: dict[str, Any]) -> tuple[int, list[Any], Any]:
        said = {"temperature": 1.0, "top_k": 0, **self.own, **body}
        scaled = {token: logit / said["temperature"] for token, logit in LOGITS.items()}
        kept = sorted(scaled, key=lambda token: -scaled[token])[: int(said["top_k"]) or None]
        total = math.log(sum(math.exp(scaled[token]) for token in kept))
        entries = [{"token": token, "logprob": scaled[token] - total if token in kept else -9999.0} for token in LOGITS]
        content = [{"token": "red", "logprob": -0.1, "top_logprobs": entries}] * body["max_tokens"]
        return self.status, [], {"choices": [{"logprobs": {"content": content}}]}

    async def models(self) -> list[dict[str, Any]]:
        return [{"id": "base", "root": self.root, "parent": None}]


def found(server: Any) -> dict[str, float]:
    return asyncio.run(probe_sampling.defaults(cast(Engine, server), "base"))


def settings(folder: Path, **values: Any) -> str:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return str(folder)


def test_an_engine_that_adds_nothing(tmp_path: Path) -> None:
    assert found(Server()) == {}
    # a file that the engine does not go by is not believed
    assert found(Server(settings(tmp_path, temperature=0.6))) == {}


def test_the_models_own_settings(tmp_path: Path) -> None:
    root = settings(tmp_path, temperature=0.6, top_k=3, do_sample=True, eos_token_id=[1, 2])
    expected = probe_sampling.SILENT | {"temperature": 0.6, "top_k": 3}
    assert found(Server(root, temperature=0.6, top_k=3)) == expected


@pytest.mark.parametrize(
    "root",
    [
        lambda folder: "",
        lambda folder: "organisation/model",
        str,
        lambda folder: settings(folder, temperature=0.9),  # not what the engine does
        lambda folder: settings(folder, temperature="warm"),
    ],
    ids=["no root", "a hub's name", "no file", "another file", "no number"],
)
def test_settings_that_cannot_be_found_out_are_replaced(
    tmp_path: Path, root: Callable[[Path], str], caplog: pytest.LogCaptureFixture
) -> None:
    assert found(Server(root(tmp_path), temperature=0.6)) == probe_sampling.SILENT
    assert "--generation-config vllm" in caplog.text


def test_an_engine_without_logprobs_is_left_as_it_is() -> None:
    server = Server(temperature=0.6)
    server.status = 400
    assert found(server) == {}


def test_an_engine_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(Server):
        async def chat(self, body: dict[str, Any]) -> tuple[int, list[Any], Any]:
            await asyncio.Event().wait()
            raise AssertionError

    monkeypatch.setattr(probe_sampling, "PROBE_SECONDS", 0.01)
    with pytest.raises(EngineError, match="no answer"):
        found(Silent())
