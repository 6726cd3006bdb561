"""The run folder: its lock, the token files, ``policy.json``, ``server.json``.

Who holds the lock is told by ``holder``. Token files are 0600. ``policy.json`` holds the settings that must not change
when a run is resumed.

It refuses a second server on one folder, and settings that do not fit what the folder was made with.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art_backends.config import TrainConfig, make_config
from art_backends.errors import ConfigError, ServerError, StoreError
from art_backends.server import holder
from art_backends.server.sessions import new_token
from art_backends.training.versions import replace_json

FIXED = ("name", "rank", "alpha", "rslora", "target_modules", "optimizer", "init_adapter")
POLICY, SERVER, STORE, VERSIONS = "policy.json", "server.json", "store.sqlite", "versions"
PIN = "pinned.json"
LOCK_TRIES, LOCK_SECONDS = 5, 0.02  # ``held_by`` takes the lock for an instant to see whether it is free


class RunFolder:
    """An acquired run folder. ``release()`` when done."""

    def __init__(self, path: Path, lock: int, work: holder.Work) -> None:
        self.path = path
        self._lock = lock
        self._work = work

    @classmethod
    def acquire(cls, path: Path, work: holder.Work = "serve") -> RunFolder:
        """Make the folder if needed and lock it; FolderInUseError names the process that holds it."""
        path = path.expanduser().absolute()
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / VERSIONS).mkdir(exist_ok=True)
            (path / "logs").mkdir(exist_ok=True)
            lock = os.open(path / holder.LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(f"folder: {path} cannot be used as run folder: {error.strerror}") from None
        try:
            _lock(lock)
        except BlockingIOError:
            held = holder.decode(os.pread(lock, 4096, 0))
            os.close(lock)
            raise held.refusal(path) from None
        except OSError as error:
            os.close(lock)
            raise ConfigError(f"folder: {path} is on a file system without locks: {error.strerror}") from None
        folder = cls(path, lock, work)
        try:
            folder._write_lock("")
            (path / SERVER).unlink(missing_ok=True)  # of a server that was killed
        except OSError as error:
            os.close(lock)
            raise ServerError(f"{path}: cannot be written: {error.strerror}") from None
        return folder

    @property
    def versions(self) -> Path:
        return self.path / VERSIONS

    @property
    def store(self) -> Path:
        """The store's file; made here so that it is private from the first byte on."""
        file = self.path / STORE
        try:
            os.close(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600))
        except OSError as error:
            raise StoreError(f"{file}: cannot be opened: {error.strerror}") from None
        return file

    def token(self, kind: str) -> str:
        """The admin's or the agent's token, from its file of mode 0600; made on first use."""
        file = self.path / f"{kind}.token"
        try:
            if file.exists():
                if file.stat().st_mode & 0o077:
                    file.chmod(0o600)
                token = file.read_text().strip()
                if token:
                    return token
            token = new_token()
            temporary = self.path / f".{kind}.token"
            temporary.unlink(missing_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as stream:
                stream.write(token + "\n")
            temporary.replace(file)
        except OSError as error:
            raise ServerError(f"{file}: the token cannot be kept: {error.strerror}") from None
        return token

    def announce(self, url: str) -> None:
        """Say where the server answers: in the lock, and in ``server.json``, written whole or not at all."""
        try:
            self._write_lock(url)
            replace_json(self.path / SERVER, {"url": url, "pid": os.getpid()})
        except OSError as error:
            raise ServerError(f"{self.path / SERVER}: cannot be written: {error.strerror}") from None

    def release(self) -> None:
        """Give the folder back; idempotent."""
        if self._lock < 0:
            return
        (self.path / SERVER).unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = -1

    def _write_lock(self, url: str) -> None:
        content = holder.encode(self._work, url)
        os.pwrite(self._lock, content, 0)
        os.ftruncate(self._lock, len(content))


def _lock(descriptor: int) -> None:
    """Lock a file; BlockingIOError if another process keeps it locked."""
    for tries_left in reversed(range(LOCK_TRIES)):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not tries_left:
                raise
            time.sleep(LOCK_SECONDS)


def read_pin(folder: Path) -> int | None:
    """The version that the folder's alias is fixed to, if any; ConfigError if the file cannot be understood."""
    path = folder / PIN
    try:
        return int(json.loads(path.read_bytes())["version"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: names no version ({type(error).__name__}): art-backends versions pin N, or unpin, writes it anew"
        ) from None


def write_pin(folder: Path, version: int | None) -> None:
    """Fix the folder's alias to a version, or let it follow the newest one again (None)."""
    path = folder / PIN
    try:
        if version is None:
            path.unlink(missing_ok=True)
        else:
            replace_json(path, {"version": version})
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class PolicyFile:
    """What the folder's policy was made with. ``digest`` is the base model's."""

    path: Path
    base_model: str
    digest: str
    fixed: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> PolicyFile | None:
        """The folder's ``policy.json``, None if there is none yet; ConfigError if it is unusable."""
        path = folder / POLICY
        try:
            content = json.loads(path.read_bytes())
            # a setting that is younger than the folder: the folder was made with what is now its default
            defaults = json.loads(make_config({}).model_dump_json(include=set(FIXED)))
            fixed = {key: content.get(key, defaults[key]) for key in FIXED}
            fixed["chat_template_digest"] = content["chat_template_digest"]
            return cls(path, str(content["base_model"]), str(content["digest"]), fixed)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: cannot be read ({error!r}); give another folder") from None

    @classmethod
    def create(cls, folder: Path, config: TrainConfig, digest: str) -> PolicyFile:
        """Write ``policy.json`` of a new run."""
        path = folder / POLICY
        fixed = _fixed(config)
        template = None if config.chat_template is None else str(config.chat_template.expanduser().absolute())
        content = {"base_model": config.base_model, "digest": digest, "chat_template": template, **fixed}
        # not checked on resume, but what `art-backends serve` goes by when it is told nothing else
        content |= config.model_dump(include={"models", "dtype", "max_model_len", "history"})
        content |= config.model_dump(include={"engine", "engine_url", "vllm", "vllm_args"})
        try:
            replace_json(path, content)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
        return cls(path, config.base_model, digest, fixed)

    def check(self, config: TrainConfig, digest: str | None = None) -> None:
        """ConfigError naming the setting and both values if ``config`` does not fit."""
        for key, wanted in _fixed(config).items():
            kept = self.fixed[key]
            if kept != wanted:
                setting = key.removesuffix("_digest")
                raise ConfigError(
                    f"{setting}: {self.path.parent} was made with {kept!r}, now asked for {wanted!r}; "
                    "use the same value to go on, or another folder to begin anew"
                )
        if digest is not None and digest != self.digest:
            raise ConfigError(
                f"base_model: {self.path.parent} was made with {self.base_model} (digest {self.digest[:12]}…), now "
                f"asked for {config.base_model} (digest {digest[:12]}…); use the same model to go on, or another folder"
            )


def _fixed(config: TrainConfig) -> dict[str, Any]:
    template = config.chat_template
    try:
        text = None if template is None else hashlib.sha256(template.expanduser().read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"chat_template: {template} cannot be read: {error.strerror}") from None
    fixed = json.loads(config.model_dump_json(include=set(FIXED)))
    if config.init_adapter is not None:
        fixed["init_adapter"] = str(config.init_adapter.expanduser().absolute())
    return {**fixed, "chat_template_digest": text}
