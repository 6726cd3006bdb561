"""An exported version is loaded by vLLM as it is, and says there what the embedded engine says with that version."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from art_backends.engines.embedded.render import HERMES_PATH

from tests.vllm.conftest import BASE_MODEL
from tests.vllm.proxied import Proxied

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("vllm")]

SECONDS = 400.0
QUESTIONS = ["What is the password?", "Name three rivers of Europe."]
EXAMPLE = {
    "messages": [
        {"role": "user", "content": "What is the password?"},
        {"role": "assistant", "content": "The password is seven blue herons."},
    ]
}


def command(*arguments: str) -> str:
    """What one of our commands prints."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-m", "art_backends.cli", *arguments],
        capture_output=True, text=True, timeout=SECONDS, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder whose version 4 has learned an answer by heart."""
    folder = tmp_path_factory.mktemp("export")
    (folder / "examples.jsonl").write_text(json.dumps(EXAMPLE) + "\n")
    command(
        "sft", str(folder / "examples.jsonl"), "--folder", str(folder / "run"), "--base-model", BASE_MODEL,
        "--epochs", "4", "--batch-size", "1", "--rank", "8", "--alpha", "16", "--learning-rate", "0.003",
        "--chat-template", str(HERMES_PATH),
    )  # fmt: skip
    return folder / "run"


def embedded(run: Path, questions: list[str]) -> list[str]:
    """Greedy answers of the newest version, from ``art-backends serve``."""
    process = subprocess.Popen(
        [sys.executable, "-m", "art_backends.cli", "serve", "--folder", str(run), "--port", "0", "--exit-with-parent"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split(" at ", 1)[1].split("/v1", 1)[0].strip()
        headers = {"authorization": f"Bearer {(run / 'agent.token').read_text().strip()}"}
        with httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=SECONDS) as client:
            return [client.post("/v1/chat/completions", json=asked(q)).raise_for_status().json() for q in questions]
    finally:
        process.terminate()
        process.communicate(timeout=60)


def asked(question: str, model: str = "policy") -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": model, "messages": messages, "temperature": 0, "max_tokens": 16}


async def test_an_exported_version_says_the_same_in_vllm(w: Proxied, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "exported"
    command("versions", "export", "4", str(out), "--folder", str(run))
    expected = [reply["choices"][0]["message"]["content"] for reply in embedded(run, QUESTIONS)]
    await w.engine.load_adapter("exported", str(out))
    try:
        replies = [await w.engine.chat(asked(question, "exported")) for question in QUESTIONS]
        base = await w.engine.chat(asked(QUESTIONS[0], w.policies.base_id))
    finally:
        await w.engine.unload_adapter("exported")
    assert [status for status, _, _ in replies] == [200] * len(replies)
    assert [reply["choices"][0]["message"]["content"] for _, _, reply in replies] == expected
    assert base[2]["choices"][0]["message"]["content"] != expected[0]  # the adapter does something
