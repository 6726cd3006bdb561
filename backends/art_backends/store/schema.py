"""The store's schema, declared once, and the way from older schemas to it.

``PRAGMA user_version`` holds the schema's version. A new file gets ``SCHEMA`` at once; an older file goes through
``MIGRATIONS`` one version at a time, all inside a single transaction: it is either the new schema or untouched.

It refuses a file whose schema is newer than this program's, and a file that is not ours (``application_id``).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping

from art_backends.errors import StoreError

VERSION = 3
APPLICATION_ID = 0x41525431  # "ART1"

# Token ids are little-endian int32, logprobs little-endian float32; *_json columns are zlib-compressed JSON.
SCHEMA = """
CREATE TABLE tokens (
    digest     TEXT PRIMARY KEY,             -- SHA-256 of the token, hexadecimal; the token itself is never stored
    kind       TEXT NOT NULL CHECK (kind IN ('admin', 'agent', 'rollout')),
    rollout_id TEXT,
    policy     TEXT,
    created    REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE rollouts (
    number        INTEGER PRIMARY KEY,       -- order of opening; pages continue after it
    id            TEXT NOT NULL UNIQUE,
    policy        TEXT NOT NULL,
    version       TEXT NOT NULL,
    purpose       TEXT NOT NULL,
    scenario_id   TEXT NOT NULL,
    scenario_json BLOB NOT NULL,
    step          INTEGER,
    group_name    TEXT NOT NULL,
    sample        INTEGER NOT NULL,
    closed        INTEGER NOT NULL DEFAULT 0,
    reward        REAL,
    fault         TEXT,
    result_json   BLOB,                      -- output, metrics, error, scored_by
    opened        REAL NOT NULL,
    finished      REAL,
    subject       TEXT                       -- SHA-256 of whom it is about, hexadecimal
);
CREATE INDEX rollouts_by_step ON rollouts (policy, step, number);
CREATE INDEX rollouts_open ON rollouts (opened) WHERE closed = 0;
CREATE INDEX rollouts_by_subject ON rollouts (subject) WHERE subject IS NOT NULL;
CREATE TABLE calls (
    number           INTEGER PRIMARY KEY,
    id               TEXT NOT NULL UNIQUE,
    rollout_id       TEXT REFERENCES rollouts (id),
    sequence         INTEGER NOT NULL,
    status           TEXT NOT NULL,
    version          TEXT,
    drifted          INTEGER NOT NULL,
    excluded         TEXT,
    started          REAL NOT NULL,
    finished         REAL,
    request_json     BLOB NOT NULL,
    prompt_token_ids BLOB NOT NULL,
    facts_json       BLOB NOT NULL,          -- the remaining fields of the call
    base             INTEGER REFERENCES calls (number),  -- request and prompt are what they add to this call's
    base_choice      INTEGER,                -- position of its answer that the prompt goes on with
    shared_ids       INTEGER NOT NULL DEFAULT 0,
    shared_messages  INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX calls_by_rollout ON calls (rollout_id, sequence, number);
CREATE INDEX calls_by_base ON calls (base) WHERE base IS NOT NULL;
CREATE TABLE choices (
    call          INTEGER NOT NULL REFERENCES calls (number) ON DELETE CASCADE,
    position      INTEGER NOT NULL,
    choice_index  INTEGER NOT NULL,
    finish_reason TEXT,
    message_json  BLOB NOT NULL,
    token_ids     BLOB NOT NULL,
    logprobs      BLOB NOT NULL,
    PRIMARY KEY (call, position)
) WITHOUT ROWID;
CREATE TABLE steps (
    policy       TEXT NOT NULL,
    step         INTEGER NOT NULL,
    kind         TEXT NOT NULL,
    version      INTEGER,
    outcome_json BLOB NOT NULL,
    recorded     REAL NOT NULL,
    PRIMARY KEY (policy, step)
) WITHOUT ROWID;
CREATE TABLE trained (
    rollout_id TEXT NOT NULL,
    policy     TEXT NOT NULL,
    step       INTEGER NOT NULL,
    calls_json BLOB NOT NULL,                -- which tokens of which call were trained, with what advantage
    PRIMARY KEY (rollout_id, policy, step)
) WITHOUT ROWID;
"""

# MIGRATIONS[n] brings schema n to schema n + 1: SQL statements, each ending in ";".
MIGRATIONS: dict[int, str] = {
    1: """
ALTER TABLE calls ADD COLUMN base INTEGER REFERENCES calls (number);
ALTER TABLE calls ADD COLUMN base_choice INTEGER;
ALTER TABLE calls ADD COLUMN shared_ids INTEGER NOT NULL DEFAULT 0;
ALTER TABLE calls ADD COLUMN shared_messages INTEGER NOT NULL DEFAULT 0;
CREATE INDEX calls_by_base ON calls (base) WHERE base IS NOT NULL;
""",
    2: """
ALTER TABLE rollouts ADD COLUMN subject TEXT;
CREATE INDEX rollouts_by_subject ON rollouts (subject) WHERE subject IS NOT NULL;
""",
}


def upgrade(
    connection: sqlite3.Connection,
    *,
    where: str,
    schema: str = SCHEMA,
    version: int = VERSION,
    migrations: Mapping[int, str] = MIGRATIONS,
) -> int:
    """Bring the file behind ``connection`` to ``version``; returns the version it had (0: it was empty).

    Raises StoreError if the file is newer than this program, not a store, or lacks a migration.
    """
    found = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if found == version:
        return found
    if found > version:
        raise StoreError(
            f"{where}: written by a newer release (schema {found}, this one knows {version}); "
            "upgrade art-inplace or use another run folder"
        )
    application = int(connection.execute("PRAGMA application_id").fetchone()[0])
    tables = int(connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
    if application not in (0, APPLICATION_ID) or (found == 0 and tables):
        raise StoreError(f"{where}: an SQLite file of another program; use another run folder")
    if found == 0:
        steps = [schema, f"PRAGMA application_id = {APPLICATION_ID}"]
    else:
        missing = [str(number) for number in range(found, version) if number not in migrations]
        if missing:
            raise StoreError(f"{where}: schema {found} is too old for this release; no migration from {missing[0]}")
        steps = [migrations[number] for number in range(found, version)]
    connection.execute("BEGIN IMMEDIATE")
    try:
        for script in steps:
            for statement in _statements(script):
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {version}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    return found


def _statements(script: str) -> list[str]:
    """The statements of a script. executescript() would commit between them, so that a crash left half a schema."""
    statements, pending = [], ""
    for line in script.splitlines(keepends=True):
        pending += line
        if sqlite3.complete_statement(pending):
            statements.append(pending)
            pending = ""
    if pending.strip():
        statements.append(pending)
    return statements
