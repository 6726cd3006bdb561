"""Who holds a run folder, and for what: written into its lock file by the holder, read by everyone else.

The lock is flock'ed, so that it ends with the process that holds it, killed or not; what stands in the file counts
only while it is held. It refuses to make anything: a folder that is looked at stays as it was.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from art_backends.errors import ConfigError, FolderInUseError

LOCK = "lock"
Work = Literal["serve", "versions", "forget"]


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds a run folder."""

    pid: int | None  # None: it has not said so yet
    url: str  # where its server answers; empty: not yet, or it is no server
    work: str  # a ``Work``

    @property
    def starting(self) -> bool:
        """Whether it is a server that does not answer yet."""
        return not self.url and self.work == "serve"

    @property
    def words(self) -> str:
        """The process, for people."""
        process = f"process {'unknown' if self.pid is None else self.pid}"
        if self.url:
            return f"{process} at {self.url}"
        return f"{process}, a server that is starting" if self.starting else f"{process}, art-backends {self.work}"

    def refusal(self, path: Path) -> FolderInUseError:
        """What to say to those who want the folder for themselves."""
        stop = "stop it" if self.pid is None else f"stop it (kill {self.pid})"
        if self.url:
            advice = f"{stop}, use that server, or give another folder"
        elif self.starting:
            advice = f"wait for it and use it, {stop}, or give another folder"
        else:
            advice = "try again when it has ended, or give another folder"
        return FolderInUseError(f"run folder {path} is in use by {self.words}: {advice}")


def encode(work: Work, url: str) -> bytes:
    """What this process writes into the lock that it holds."""
    return f"{os.getpid()} {url or '-'} {work}\n".encode()


def decode(content: bytes) -> Holder:
    """Who wrote this into a lock that is held."""
    pid, url, work, *_ = [*content.decode(errors="replace").split(), "", "", ""]
    return Holder(int(pid) if pid.isdecimal() else None, "" if url == "-" else url, work or "serve")


def held_by(folder: Path) -> Holder | None:
    """Who holds the folder now; None if nobody does, or there is no such folder. ConfigError if it cannot be told."""
    file = folder.expanduser() / LOCK
    try:
        lock = os.open(file, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # given back at once, by closing
    except BlockingIOError:
        return decode(os.pread(lock, 4096, 0))
    except OSError as error:
        raise ConfigError(f"{file}: is on a file system without locks: {error.strerror}") from None
    finally:
        os.close(lock)
    return None
