"""Programs as agents: real ones, started, fed, scored and killed."""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from art_backends.capture.scope import rollout_scope
from art_backends.command import OUTPUT_BYTES, Command, CommandError, reported
from art_backends.errors import ConfigError, RewardError, ServerError
from art_backends.rewards.values import Run
from art_backends.trajectories import RolloutError

WAIT = 20.0
SCENARIO = {"question": "Wo ist Zürich?"}


@pytest.fixture(autouse=True)
def scope() -> Iterator[None]:
    with rollout_scope("http://127.0.0.1:9/v1", "the-token-of-this-rollout", "r1"):
        yield


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], Command]:
    def make(source: str, **options: Any) -> Command:
        file = tmp_path / "agent.py"
        file.write_text(source)
        return Command([sys.executable, str(file)], **options)

    return make


async def ran(command: Command) -> dict[str, Any]:
    return await asyncio.wait_for(command(SCENARIO), WAIT)


async def test_it_gets_the_scenario_and_gives_its_output(program: Any) -> None:
    source = (
        "import os, sys; print(sys.stdin.read() == os.environ['ART_SCENARIO'] + chr(10), os.environ['ART_SCENARIO'])"
    )
    found = await ran(program(source))
    first, _, rest = found["stdout"].partition(" ")
    assert first == "True"
    assert json.loads(rest) == SCENARIO
    assert (found["stderr"], found["exit_code"], found["report"]) == ("", 0, None)


async def test_the_sdks_find_the_proxy_and_no_other_credentials(program: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-user")
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "of-the-user")
    monkeypatch.setenv("NO_PROXY", "intranet")
    source = "import json, os; print(json.dumps(dict(os.environ)))"
    command = program(source, environment={"MINE": "1"})
    seen = json.loads((await ran(command))["stdout"])
    assert seen["OPENAI_BASE_URL"] == "http://127.0.0.1:9/v1"
    assert seen["ANTHROPIC_BASE_URL"] == seen["AZURE_OPENAI_ENDPOINT"] == "http://127.0.0.1:9"
    keys = {seen[name] for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "AZURE_OPENAI_API_KEY", "ART_API_KEY")}
    assert keys == {"the-token-of-this-rollout"}
    assert "ANTHROPIC_AUTH_TOKEN" not in seen
    assert seen["NO_PROXY"] == seen["no_proxy"] == "intranet,127.0.0.1"
    assert (seen["ART_ROLLOUT_ID"], seen["MINE"]) == ("r1", "1")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import sys; sys.stderr.write('no such city'); sys.exit(3)", "exit code 3: no such city"),
        ("raise SystemExit(1)", "exit code 1, with nothing on standard error"),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL, with nothing"),
        ("import os; os.kill(os.getpid(), 40)", "killed by signal 40, with nothing"),
        ("raise ValueError('what')", "exit code 1: .*ValueError: what"),
        ("import os; open(os.environ['ART_REPORT'], 'w').write('1,')", "ART_REPORT is no JSON"),
    ],
)
async def test_a_program_that_fails_is_an_error_of_the_agent(program: Any, source: str, said: str) -> None:
    with pytest.raises(CommandError, match=f"(?s){said}"):
        await ran(program(source))


async def test_a_machine_that_cannot_start_it_is_no_error_of_the_agent(program: Any) -> None:
    command = program("print()", environment={"TOO_LONG": "x" * 200_000})
    with pytest.raises(ServerError, match=r"could not be started: .*too long"):
        await ran(command)


async def test_a_program_that_reads_nothing_and_one_that_says_too_much(program: Any) -> None:
    big = {"text": "x" * 3_000_000}
    quiet = program("import os; os.close(0); print('ART_SCENARIO' in os.environ)")
    assert (await asyncio.wait_for(quiet(big), WAIT))["stdout"] == "False\n", "a variable has no room for it"
    reading = program("import sys; print(len(sys.stdin.read()))")
    assert int((await asyncio.wait_for(reading(big), WAIT))["stdout"]) > 3_000_000
    loud = await ran(program(f"import sys; sys.stdout.write('a' + 'b' * {OUTPUT_BYTES}); print(end='c')"))
    assert loud["stdout"] == "b" * (OUTPUT_BYTES - 1) + "c"


CHILDREN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
held = os.open(sys.argv[0] + ".held", os.O_WRONLY)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=[held])
os.write(held, f"{os.getpid()} {child.pid}\\n".encode())
print(os.getpid(), child.pid, flush=True)
"""


@pytest.mark.parametrize("lingers", [True, False])
async def test_nothing_that_it_started_is_left(program: Any, tmp_path: Path, lingers: bool) -> None:
    """Cancelled, though it ignores SIGTERM; or ended by itself, with a child that goes on and holds its output."""
    held = tmp_path / "agent.py.held"
    os.mkfifo(held)
    task = asyncio.ensure_future(program(CHILDREN + ("time.sleep(600)" if lingers else ""))(SCENARIO))
    pipe = await asyncio.to_thread(held.open)  # until the program opens it, too
    with pipe:
        pids = await asyncio.to_thread(pipe.readline)
        if lingers:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(task, WAIT)
        else:
            assert (await asyncio.wait_for(task, WAIT))["stdout"] == pids
        assert await asyncio.wait_for(asyncio.to_thread(pipe.read), WAIT) == ""  # all who held it are gone


async def test_a_child_that_got_away_does_not_hold_the_rollout(program: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "agent.py.held")
    source = CHILDREN.replace("pass_fds=", "start_new_session=True, pass_fds=")
    task = asyncio.ensure_future(program(source)(SCENARIO))
    with await asyncio.to_thread((tmp_path / "agent.py.held").open) as pipe:
        child = int((await asyncio.to_thread(pipe.readline)).split()[1])
        try:
            assert (await asyncio.wait_for(task, WAIT))["exit_code"] == 0
        finally:
            os.kill(child, 9)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("no-such-program-here x", "no program 'no-such-program-here'"),
        ("", "empty"),
        ("echo 'x", "cannot be taken apart"),
        ([], "empty"),
    ],
)
def test_a_command_that_cannot_run_is_told_at_once(command: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Command(command)


def test_a_line_is_quoted_as_in_a_shell() -> None:
    assert Command("sh -c 'echo \"a b\"'").words == ["sh", "-c", 'echo "a b"']


def run(report: Any = None, error: RolloutError | None = None) -> Run:
    output = None if error else {"stdout": "", "stderr": "", "exit_code": 0, "report": report}
    return Run({}, output, [], error, "r1")


def test_a_program_scores_itself() -> None:
    assert reported(run({"reward": 0.5, "success": True, "note": "x"})) == {"reward": 0.5, "success": True}
    assert reported(run(error=RolloutError(type="CommandError", message="exit code 1"))) == {"reward": 0.0}
    for nothing in (None, {}, [1], {"note": "x"}):
        with pytest.raises(RewardError, match="ART_REPORT"):
            reported(run(nothing))
