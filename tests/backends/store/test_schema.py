"""Schema 1, frozen here, opens with this release; a migration is applied whole or not at all."""

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from art_backends.errors import StoreError
from art_backends.store import Store, schema
from art_backends.store.codec import pack_floats, pack_ids, pack_json
from art_backends.trajectories import Call, Rollout

# As the first release wrote it. Never edit: this is what lies on people's disks.
SCHEMA_1 = """
CREATE TABLE tokens (digest TEXT PRIMARY KEY, kind TEXT NOT NULL CHECK (kind IN ('admin', 'agent', 'rollout')),
  rollout_id TEXT, policy TEXT, created REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE rollouts (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, policy TEXT NOT NULL,
  version TEXT NOT NULL, purpose TEXT NOT NULL, scenario_id TEXT NOT NULL, scenario_json BLOB NOT NULL, step INTEGER,
  group_name TEXT NOT NULL, sample INTEGER NOT NULL, closed INTEGER NOT NULL DEFAULT 0, reward REAL, fault TEXT,
  result_json BLOB, opened REAL NOT NULL, finished REAL);
CREATE INDEX rollouts_by_step ON rollouts (policy, step, number);
CREATE INDEX rollouts_open ON rollouts (opened) WHERE closed = 0;
CREATE TABLE calls (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, rollout_id TEXT REFERENCES rollouts (id),
  sequence INTEGER NOT NULL, status TEXT NOT NULL, version TEXT, drifted INTEGER NOT NULL, excluded TEXT,
  started REAL NOT NULL, finished REAL, request_json BLOB NOT NULL, prompt_token_ids BLOB NOT NULL,
  facts_json BLOB NOT NULL);
CREATE INDEX calls_by_rollout ON calls (rollout_id, sequence, number);
CREATE TABLE choices (call INTEGER NOT NULL REFERENCES calls (number) ON DELETE CASCADE, position INTEGER NOT NULL,
  choice_index INTEGER NOT NULL, finish_reason TEXT, message_json BLOB NOT NULL, token_ids BLOB NOT NULL,
  logprobs BLOB NOT NULL, PRIMARY KEY (call, position)) WITHOUT ROWID;
CREATE TABLE steps (policy TEXT NOT NULL, step INTEGER NOT NULL, kind TEXT NOT NULL, version INTEGER,
  outcome_json BLOB NOT NULL, recorded REAL NOT NULL, PRIMARY KEY (policy, step)) WITHOUT ROWID;
CREATE TABLE trained (rollout_id TEXT NOT NULL, policy TEXT NOT NULL, step INTEGER NOT NULL,
  calls_json BLOB NOT NULL, PRIMARY KEY (rollout_id, policy, step)) WITHOUT ROWID;
PRAGMA application_id = 1095914545;
PRAGMA user_version = 1;
"""


@pytest.fixture
def first_release(tmp_path: Path, make_rollout: Callable[..., Rollout], make_call: Callable[..., Call]) -> Path:
    """A store of schema 1 with a closed rollout and its call, written without the store's code."""
    path = tmp_path / "store.sqlite"
    call = make_call()
    facts = call.model_dump(
        mode="json",
        include={"model", "node", "sampling", "capture", "prompt_mode", "continues", "broken_control_tokens"}
        | {"retry", "error"},
    )
    with sqlite3.connect(path) as connection:
        connection.executescript(SCHEMA_1)
        connection.execute(
            "INSERT INTO rollouts VALUES (1, 'r1', 'policy', 'policy@0', 'train', 's1', ?, 1, 'g1', 0, 1, 0.5, NULL,"
            " ?, 10.0, 13.0)",
            (pack_json({"question": "ä?"}), pack_json({"output": "four", "metrics": {"success": 1.0}, "error": None})),
        )
        connection.execute(
            "INSERT INTO calls VALUES (1, 'c1', 'r1', 0, 'ok', 'policy@0', 0, NULL, 11.0, 12.0, ?, ?, ?)",
            (pack_json(call.request), pack_ids(call.prompt_token_ids), pack_json(facts)),
        )
        for position, choice in enumerate(call.choices):
            connection.execute(
                "INSERT INTO choices VALUES (1, ?, ?, ?, ?, ?, ?)",
                (
                    position,
                    choice.index,
                    choice.finish_reason,
                    pack_json(choice.message),
                    pack_ids(choice.token_ids),
                    pack_floats(choice.logprobs),
                ),
            )
    connection.close()
    return path


def test_the_first_schema_opens_with_this_release(first_release: Path, make_call: Callable[..., Call]) -> None:
    store = Store.open(first_release)
    found = store.rollout("r1")
    store.finish_call(make_call("c2", rollout_id=None))
    store.close()
    assert found is not None
    assert found.calls == [make_call()]
    assert (found.reward, found.output, found.metrics) == (0.5, "four", {"success": 1.0})
    with sqlite3.connect(first_release) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (schema.VERSION,)
    connection.close()


@pytest.fixture
def connection(first_release: Path) -> Iterator[sqlite3.Connection]:
    opened = sqlite3.connect(first_release, isolation_level=None)
    yield opened
    opened.close()


def test_migrations_run_in_order(connection: sqlite3.Connection) -> None:
    migrations = {
        1: "ALTER TABLE rollouts ADD COLUMN note TEXT;\nUPDATE rollouts SET note = 'a;b';",
        2: "CREATE TABLE extra (id TEXT);\nINSERT INTO extra SELECT note FROM rollouts;",
    }
    assert schema.upgrade(connection, where="here", version=3, migrations=migrations) == 1
    assert connection.execute("SELECT id FROM extra").fetchall() == [("a;b",)]
    assert connection.execute("PRAGMA user_version").fetchone() == (3,)
    assert schema.upgrade(connection, where="here", version=3, migrations=migrations) == 3


def test_a_migration_that_fails_leaves_the_file_as_it_was(connection: sqlite3.Connection) -> None:
    migrations = {1: "ALTER TABLE rollouts ADD COLUMN note TEXT;", 2: "INSERT INTO nowhere VALUES (1);"}
    with pytest.raises(sqlite3.OperationalError, match="nowhere"):
        schema.upgrade(connection, where="here", version=3, migrations=migrations)
    assert connection.execute("PRAGMA user_version").fetchone() == (1,)
    columns = [row[1] for row in connection.execute("PRAGMA table_info(rollouts)")]
    assert "note" not in columns


def test_a_missing_migration_is_said(connection: sqlite3.Connection) -> None:
    with pytest.raises(StoreError, match="no migration from 2"):
        schema.upgrade(connection, where="here", version=3, migrations={1: ""})


def test_a_newer_schema_is_refused_untouched(first_release: Path) -> None:
    with sqlite3.connect(first_release) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(StoreError, match=r"newer release \(schema 99, this one knows \d+\); upgrade"):
        Store.open(first_release)


def test_a_file_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE theirs (id TEXT)")
    connection.close()
    with pytest.raises(StoreError, match="another program"):
        Store.open(path)
    path.write_bytes(b"this is no database at all, but a text" * 100)
    with pytest.raises(StoreError, match=r"cannot be opened: file is not a database"):
        Store.open(path)
