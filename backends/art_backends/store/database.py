"""Connections to the store's file: one writer, a few readers, and SQLite's errors in clear words.

WAL with synchronous=NORMAL: a killed process loses no committed row; a power cut may roll back the last commits but
leaves the file consistent. A write is one transaction: all of it, or nothing.

After a failed fsync nothing is retried (what the kernel dropped would be lost silently): the store turns read-only
until it is opened again. A full disk is no such case: the write is rolled back, later ones are tried anew.
"""

from __future__ import annotations

import queue
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from art_backends.errors import StoreError
from art_backends.store import schema

READERS = 4
BUSY_SECONDS = 10.0
_POISON = ("SQLITE_IOERR_FSYNC", "SQLITE_IOERR_DIR_FSYNC", "SQLITE_CORRUPT", "SQLITE_NOTADB")


class ConflictError(StoreError):
    """What is asked contradicts what is stored: another outcome for a closed rollout, a call in a closed rollout."""


class NotFoundError(StoreError):
    """The store holds no such rollout."""


class Database:
    """The store's file. Thread-safe: writers take turns, readers run beside them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._broken: str | None = None
        self._closed = False
        self._readers: queue.LifoQueue[sqlite3.Connection | None] = queue.LifoQueue()
        with self._words("opened"):
            self._writer = self._connect()
            try:
                self._prepare(self._writer)
            except BaseException:
                self._writer.close()
                raise
        for _ in range(READERS):
            self._readers.put(None)  # connected on first use

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False, cached_statements=256
        )
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = NORMAL")
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        problems = [row[0] for row in connection.execute("PRAGMA quick_check(3)") if row[0] != "ok"]
        if problems:
            raise StoreError(
                f"{self.path}: the store is damaged ({problems[0]}); move it away and start again: "
                "committed adapter versions are kept in the folder versions/"
            )
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise StoreError(f"{self.path}: this file system cannot hold the store (journal mode {mode}, not wal)")
        schema.upgrade(connection, where=str(self.path))

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """One transaction: committed when the block ends, rolled back when it raises."""
        with self._lock, self._words("written"):
            connection = self._writable()
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:  # a full disk may have ended it already
                    connection.execute("ROLLBACK")
                raise

    def _writable(self) -> sqlite3.Connection:
        """The writer's connection; StoreError if nothing is written any more."""
        if self._broken is not None:
            raise StoreError(self._broken)
        if self._closed:
            raise StoreError(f"{self.path}: the store is closed")
        return self._writer

    def wipe(self) -> None:
        """Rewrite the file without what was deleted from it, and empty the log beside it: nothing of it is left.

        StoreError if a reader needs the log for longer than BUSY_SECONDS.
        """
        with self._lock, self._words("written"):
            connection = self._writable()
            connection.execute("VACUUM")
            busy = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        if busy:
            raise StoreError(
                f"{self.path}: deleted, but a reader still needs the log that has it ({self.path.name}-wal): ask again"
            )

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """A read-only connection that sees everything committed; a block sees one snapshot."""
        reader = self._readers.get(timeout=BUSY_SECONDS)
        try:
            with self._words("read"):
                if self._closed:
                    raise StoreError(f"{self.path}: the store is closed")
                if reader is None:
                    reader = self._connect()
                    reader.execute("PRAGMA query_only = ON")
                reader.execute("BEGIN")
                try:
                    yield reader
                finally:
                    reader.execute("ROLLBACK")
        finally:
            self._readers.put(reader)

    @property
    def broken(self) -> str | None:
        """Why the store no longer writes, or None."""
        return self._broken

    def close(self) -> None:
        """Close every connection; the write-ahead log is folded into the file. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for _ in range(READERS):
                reader = self._readers.get(timeout=BUSY_SECONDS)
                if reader is not None:
                    reader.close()
                self._readers.put(None)
            self._writer.close()

    @contextmanager
    def _words(self, doing: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.IntegrityError as error:
            raise ConflictError(f"{self.path}: {error}") from error
        except sqlite3.Error as error:
            name = getattr(error, "sqlite_errorname", "") or type(error).__name__
            message = f"{self.path}: the store cannot be {doing}: {error} ({name})"
            if name.startswith("SQLITE_FULL") or name in ("SQLITE_IOERR_WRITE", "SQLITE_IOERR_TRUNCATE"):
                message += "; the disk is full or the file may not grow: free space, then capture goes on by itself"
            elif name.startswith(_POISON):
                message += "; nothing more is written: check the disk, then start the server again"
                if doing == "written":
                    self._broken = message
            elif name.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM")):
                message += "; check that the folder exists and is writable"
            raise StoreError(message) from error
