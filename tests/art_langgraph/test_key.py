"""An app whose client wants a key when it is made is trained from a shell that has none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

APP = """
import sys
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph

model = ChatOpenAI(model="gpt-4o-mini")
sys.exit("the app was loaded")
"""


FUNCTION = """
import os
import art_langgraph
try:
    art_langgraph.train("app:graph", scenarios="tasks.jsonl", reward=lambda run: 1.0)
finally:
    assert "OPENAI_API_KEY" not in os.environ
"""


@pytest.mark.parametrize("by", ["the command", "the function"])
def test_no_key_is_needed(tmp_path: Path, by: str) -> None:
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "tasks.jsonl").write_text('{"question": "a"}\n{"question": "b"}\n')
    (tmp_path / "rewards.py").write_text("def score(run):\n    return 1.0\n")
    command = [sys.executable, "-m", "art_langgraph.cli", "train", "app:graph", "--scenarios", "tasks.jsonl"]
    command += ["--reward", "rewards:score", "--folder", str(tmp_path / "run")]
    if by == "the function":
        command = [sys.executable, "-c", FUNCTION]
    environment = {key: value for key, value in os.environ.items() if key != "OPENAI_API_KEY"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path, env=environment
    )
    assert "the app was loaded" in done.stderr
    assert "api_key" not in done.stderr
