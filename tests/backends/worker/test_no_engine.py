"""The worker without an engine: a real process on a tiny random model; it trains, and tells the tokenizer."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from art_backends.config import TrainConfig
from art_backends.proxy.engine_client import EngineClient
from art_backends.server import hosting, worker_jobs
from art_backends.server.folder import RunFolder
from art_backends.server.supervisor import Supervisor
from art_backends.training import versions
from art_backends.worker.__main__ import main

from tests.backends.training.conftest import make_call, make_group
from tests.e2e.conftest import CHATML, make_model

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def child(tmp_path: Path, model: Path) -> AsyncIterator[tuple[Supervisor, EngineClient, TrainConfig]]:
    settings: dict[str, Any] = {"engine": "vllm", "rank": 2, "alpha": 4.0, "threads": 1, "max_model_len": 512}
    config = TrainConfig(base_model=str(model), folder=tmp_path / "run", **settings)
    folder = RunFolder.acquire(config.folder)
    worker = hosting.worker(config, folder)
    client = EngineClient(uds=str(worker.socket))
    await worker.start()
    yield worker, client, config
    await client.aclose()
    await worker.stop()
    folder.release()


async def test_it_tells_the_tokenizer_and_trains_but_answers_no_call(child: Any, model: Path) -> None:
    worker, client, config = child
    ready = worker.ready
    assert (ready["model"], ready["max_model_len"], ready["own_template"]) == (str(model), 512, False)
    assert "<tool_call>" in ready["chat_template"], "a template that shows no tools is replaced by ours"
    info = await client.tokenizer_info()
    assert info is not None
    assert info["chat_template"] == ready["chat_template"]
    assert {"<|im_start|>", "<|im_end|>"} <= set(info["special_tokens"])
    assert (info["eos_token"], len(info["eos_token_ids"])) == ("<|im_end|>", 1)
    assert await client.healthy()
    rendered = await client.tokenize({"messages": [{"role": "user", "content": "Hi"}]})
    assert rendered is not None
    text = await client.detokenize(rendered["tokens"])
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    for path in ("/v1/chat/completions", "/v1/load_lora_adapter"):
        assert (await client.post(path, {})).status == 404
    groups = [
        make_group("g", ("r1", 1.0, [make_call("a", [5, 6], [7, 8])]), ("r2", 0.0, [make_call("b", [5, 6], [9, 8])]))
    ]
    folder = config.folder / "versions"
    content = worker_jobs.encode(policy="policy", from_version=0, versions=folder, step=1, config=config, groups=groups)
    job = await worker_jobs.submit(client, content)
    while (report := await worker_jobs.report(client, job)).state == "running":
        pass
    assert report.outcome is not None
    assert report.outcome.kind == "committed"
    assert versions.read_version(folder, "policy", 1) is not None


def test_no_weights_are_read_before_the_first_step(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reading them is what the embedded engine would do at start; in here it is an error."""
    from art_backends.worker import __main__ as module

    def no_engine(*_: Any, **__: Any) -> None:
        raise AssertionError("the embedded engine's copy of the weights was read")

    async def serve(*_: Any) -> None:
        return

    monkeypatch.setattr(module, "load_base", no_engine)
    monkeypatch.setattr(module.transformers.AutoModelForCausalLM, "from_pretrained", no_engine)
    monkeypatch.setattr(module, "_serve", serve)
    words = ["--uds", str(tmp_path / "s"), "--base-model", str(model), "--name", "p", "--versions", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["worker", *words, "--threads", "1", "--no-engine"])
    assert main() == 0
    monkeypatch.setattr(sys, "argv", ["worker", *words, "--threads", "1"])
    with pytest.raises(AssertionError, match="copy of the weights was read"):
        main()


def test_the_models_own_template_stays_its_own(tmp_path: Path) -> None:
    import transformers
    from art_backends.engines.embedded.app import create_tokenizer_app

    shows_tools = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + CHATML
    for template, own in ((shows_tools, True), (CHATML, False)):
        folder = make_model(tmp_path / str(own), template)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        _, in_force = create_tokenizer_app(tokenizer, max_model_len=64)
        assert in_force.is_the_models is own
        _, in_force = create_tokenizer_app(tokenizer, max_model_len=64, chat_template="{{ messages }}")
        assert not in_force.is_the_models
