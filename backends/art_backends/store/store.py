"""The durable store of a run: rollouts, their calls, training steps, and token digests.

Every method blocks and is one transaction; the server goes through ``AsyncStore``. All SQL is parametrised, and the
filters of ``rollouts`` are a fixed list. A rollout's outcome can be written once: closing it again with the same
content is a no-op, with other content a ConflictError.

Texts are written without the secrets that a ``Redactor`` finds in them.

It refuses to hold secrets (only digests of tokens), to open a file that is damaged or of a newer release, and to
take a call into a rollout that is closed.
"""

from __future__ import annotations

import sqlite3
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, cast

from art_backends.redaction import Redactor
from art_backends.store import forgetting, rows
from art_backends.store.codec import pack_json, unpack_json
from art_backends.store.database import ConflictError, Database, NotFoundError
from art_backends.store.deltas import Known
from art_backends.store.forgetting import Forgotten
from art_backends.trajectories import Call, CallStatus, Purpose, Rollout, RolloutError

TokenKind = Literal["admin", "agent", "rollout"]
MAX_PAGE = 10_000
_BEYOND = "\U0010ffff"  # no character is greater
KNOWN_ROLLOUTS = 256  # whose calls are remembered, for the next ones to stand on


class Ending(TypedDict, total=False):
    """How a rollout ended; what is left out is None. See ``Rollout``."""

    output: Any
    reward: float | None
    metrics: Mapping[str, float] | None
    scored_by: str | None
    error: RolloutError | None
    fault: str | None


class Filters(TypedDict, total=False):
    """Which rollouts; what is left out, or None, does not matter.

    ``after``: the id of the last of the page before. ``prefix``: how their ids begin.
    """

    policy: str | None
    step: int | None
    purpose: Purpose | str | None
    closed: bool | None
    group: str | None
    after: str | None
    prefix: str | None


@dataclass(frozen=True, slots=True)
class Token:
    """What a bearer token may do; ``digest`` is the SHA-256 of the token in hexadecimal."""

    digest: str
    kind: TokenKind
    rollout_id: str | None
    policy: str | None
    created: float  # seconds since the epoch


class CallWrite(NamedTuple):
    """A call to be written: its intent, or its outcome."""

    call: Call
    begins: bool = False


class Store:
    """See the module. Open with ``Store.open(path)``; thread-safe."""

    def __init__(self, database: Database, redactor: Redactor) -> None:
        self._database = database
        self._redactor = redactor
        self._known: OrderedDict[str, dict[str, Known]] = OrderedDict()  # by rollout and call; of recent rollouts
        self._next_number: int | None = None  # of the next call that is new; None: the file knows

    @classmethod
    def open(cls, path: Path, redactor: Redactor | None = None) -> Store:
        """Open or create the store; StoreError if it is damaged, newer than this release, or cannot be written.

        ``redactor`` None: one that knows the usual formats.
        """
        return cls(Database(Path(path)), redactor or Redactor())

    def close(self) -> None:
        self._database.close()

    @property
    def path(self) -> Path:
        return self._database.path

    @property
    def broken(self) -> str | None:
        """Why nothing more is written (a failed fsync), or None."""
        return self._database.broken

    # tokens

    def add_token(self, kind: TokenKind, digest: str, rollout_id: str | None = None, policy: str | None = None) -> None:
        """Remember a token by its digest; the same digest again replaces what it stood for."""
        with self._database.write() as connection:
            _insert_token(connection, kind, digest, rollout_id, policy)

    def find_token(self, digest: str) -> Token | None:
        with self._database.read() as connection:
            row = connection.execute(
                "SELECT digest, kind, rollout_id, policy, created FROM tokens WHERE digest = ?", (digest,)
            ).fetchone()
        return None if row is None else Token(row[0], cast(TokenKind, row[1]), row[2], row[3], row[4])

    def drop_tokens(self, kind: TokenKind, keep: Iterable[str] = ()) -> None:
        """Forget the tokens of a kind, but those whose digests are in ``keep``."""
        kept = set(keep)
        with self._database.write() as connection:
            found = [row[0] for row in connection.execute("SELECT digest FROM tokens WHERE kind = ?", (kind,))]
            connection.executemany(
                "DELETE FROM tokens WHERE digest = ?", [(item,) for item in found if item not in kept]
            )

    # rollouts

    def open_rollout(self, rollout: Rollout, token_digest: str | None = None) -> None:
        """Write an open rollout, and its token with it. ConflictError if the id is taken."""
        rollout = rollout.model_copy(update={"scenario": self._redactor.value(rollout.scenario)})
        with self._database.write() as connection:
            rows.insert_rollout(connection, rollout)
            if token_digest is not None:
                _insert_token(connection, "rollout", token_digest, rollout.id, rollout.policy)

    def close_rollout(self, rollout_id: str, **ending: Unpack[Ending]) -> Rollout:
        """Close a rollout with its outcome and return it without its calls.

        Again with equal content: the stored one. ConflictError for other content, NotFoundError for an unknown id.
        """
        _check_names(ending, Ending)
        error, reward, fault = ending.get("error"), ending.get("reward"), self._redactor.value(ending.get("fault"))
        result = {
            "output": self._redactor.value(ending.get("output")),
            "metrics": dict(ending.get("metrics") or {}),
            "error": None if error is None else self._redactor.value(error.model_dump(mode="json")),
        }
        if ending.get("scored_by") is not None:
            result["scored_by"] = ending.get("scored_by")
        with self._database.write() as connection:
            row = _rollout_row(connection, rollout_id)
            if row is None:
                raise NotFoundError(f"there is no rollout {rollout_id!r} in {self.path}")
            if row["closed"]:
                stored = (unpack_json(row["result_json"]), row["reward"], row["fault"])
                if stored != (unpack_json(pack_json(result)), reward, fault):
                    was = f"fault {row['fault']!r}" if row["fault"] else f"reward {row['reward']}"
                    raise ConflictError(f"rollout {rollout_id} is closed already with another outcome ({was})")
                return rows.rollout_of(row)
            connection.execute(
                "UPDATE rollouts SET closed = 1, result_json = ?, reward = ?, fault = ?, finished = ? WHERE id = ?",
                (pack_json(result), reward, fault, time.time(), rollout_id),
            )
            self._known.pop(rollout_id, None)
            return rows.rollout_of(cast(sqlite3.Row, _rollout_row(connection, rollout_id)))

    def close_open_rollouts(self, *, fault: str, opened_before: float, subject: str | None = None) -> list[str]:
        """Close every open rollout (about a subject) that was opened before a time (seconds since the epoch); returns
        their ids.

        Those of apps have no fault: that nobody closed them is how they end.
        """
        about = None if subject is None else forgetting.subject_digest(subject)
        with self._database.write() as connection:
            found = [
                row[0]
                for row in connection.execute(
                    "SELECT id FROM rollouts WHERE closed = 0 AND opened < ? AND (? IS NULL OR subject = ?)"
                    " ORDER BY number",
                    (opened_before, about, about),
                )
            ]
            result = pack_json({"output": None, "metrics": {}, "error": None})
            connection.executemany(
                "UPDATE rollouts SET closed = 1, fault = CASE purpose WHEN ? THEN NULL ELSE ? END, result_json = ?,"
                " finished = ? WHERE id = ?",
                [(Purpose.TRAFFIC.value, fault, result, time.time(), rollout_id) for rollout_id in found],
            )
        return found

    def rollout(self, rollout_id: str) -> Rollout | None:
        """The rollout with its calls, or None."""
        with self._database.read() as connection:
            row = _rollout_row(connection, rollout_id)
            if row is None:
                return None
            return rows.rollout_of(row, rows.calls_of(connection, [rollout_id])[rollout_id])

    def rollouts_by_id(self, rollout_ids: Iterable[str]) -> list[Rollout]:
        """These rollouts with their calls, ordered by id; unknown ids are left out."""
        wanted = sorted(set(rollout_ids))
        found: list[Rollout] = []
        with self._database.read() as connection:
            for start in range(0, len(wanted), rows.BATCH):
                batch = wanted[start : start + rows.BATCH]
                calls = rows.calls_of(connection, batch)
                marks = ", ".join("?" * len(batch))
                found += [
                    rows.rollout_of(row, calls[row["id"]])
                    for row in connection.execute(
                        f"SELECT * FROM rollouts WHERE id IN ({marks}) ORDER BY id",  # noqa: S608  only marks
                        batch,
                    )
                ]
        return found

    def rollouts(
        self, *, limit: int = 1000, with_calls: bool = False, newest: bool = False, **filters: Unpack[Filters]
    ) -> list[Rollout]:
        """Rollouts in order of opening: the first of those that fit, or (``newest``) the last."""
        _check_names(filters, Filters)
        purpose, prefix = filters.get("purpose"), filters.get("prefix")
        clauses = {
            "policy = ?": filters.get("policy"),
            "step = ?": filters.get("step"),
            "purpose = ?": None if purpose is None else Purpose(purpose).value,
            "closed = ?": filters.get("closed"),
            "group_name = ?": filters.get("group"),
            "number > (SELECT number FROM rollouts WHERE id = ?)": filters.get("after"),
            # a range of the index of ids; no pattern, so that no character of the prefix has a meaning
            "id >= ?": prefix,
            "id < ?": None if prefix is None else prefix + _BEYOND,
        }
        given = {clause: value for clause, value in clauses.items() if value is not None}
        where = f"WHERE {' AND '.join(given)}" if given else ""
        order = "DESC" if newest else "ASC"
        with self._database.read() as connection:
            found = connection.execute(
                f"SELECT * FROM rollouts {where} ORDER BY number {order} LIMIT ?",  # noqa: S608  literals all
                [*given.values(), max(0, min(limit, MAX_PAGE))],
            ).fetchall()
            found = found[::-1] if newest else found
            calls = rows.calls_of(connection, [row["id"] for row in found]) if with_calls else {}
            return [rows.rollout_of(row, calls.get(row["id"], ())) for row in found]

    # calls

    def begin_call(self, call: Call) -> None:
        """Write a call's intent. ConflictError if its rollout is closed (or unknown), or its id is taken."""
        self._write_calls([CallWrite(call, begins=True)])

    def finish_call(self, call: Call) -> None:
        """Write a call's outcome, in place of its intent if there is one; the same outcome again changes nothing.

        A call that ends after its rollout was closed is kept but marked ``excluded="late"``: what a closed rollout
        trains never changes any more.
        """
        self._write_calls([CallWrite(call)])

    def write_calls(self, writes: Sequence[CallWrite]) -> list[Exception | None]:
        """Intents and outcomes, in this order; what was wrong with each.

        One transaction, and as fast as one, unless something is wrong: then each has its own.
        """
        if len(writes) > 1:
            with suppress(Exception):  # boundary: told below of those that it is the fault of
                self._write_calls(writes)
                return [None] * len(writes)
        found: list[Exception | None] = []
        for write in writes:
            try:
                self._write_calls([write])
                found.append(None)
            except Exception as error:  # noqa: BLE001 - boundary: handed to who asked for this one
                found.append(error)
        return found

    def _write_calls(self, writes: Sequence[CallWrite]) -> None:
        """One transaction; if it fails, what is known of the rollouts is read anew next time."""
        try:
            with self._database.write() as connection:
                for write in writes:
                    self._write_call(connection, self._redactor.call(write.call), begins=write.begins)
        except BaseException:
            self._next_number = None
            for write in writes:
                self._known.pop(write.call.rollout_id or "", None)
            raise

    def _write_call(self, connection: sqlite3.Connection, call: Call, *, begins: bool) -> None:
        """Write a call beside what is known of its rollout."""
        closed = None if call.rollout_id is None else _closed(connection, call.rollout_id)
        if begins and call.rollout_id is not None and closed is not False:
            state = "unknown" if closed is None else "closed"
            raise ConflictError(f"call {call.id}: rollout {call.rollout_id} is {state}")
        earlier = self._calls_known(connection, call)
        again = earlier.get(call.id)
        if again is not None and begins:
            raise ConflictError(f"call {call.id} has begun already")
        if closed:
            before = connection.execute("SELECT status FROM calls WHERE id = ?", (call.id,)).fetchone()
            if before is not None and before[0] != CallStatus.OPEN.value:
                return
            call = call.model_copy(update={"excluded": call.excluded or "late"})
        number = self._number(connection) if again is None else again.number
        earlier[call.id] = rows.write_call(connection, call, number, list(earlier.values()), again=again)

    def _calls_known(self, connection: sqlite3.Connection, call: Call) -> dict[str, Known]:
        """What is known of the calls of a call's rollout, by id, in order of their numbers; to be added to."""
        if call.rollout_id is None:  # it stands on nothing, and is written anew
            connection.execute("DELETE FROM calls WHERE id = ? AND rollout_id IS NULL", (call.id,))
            return {}
        known = self._known.get(call.rollout_id)
        if known is None:
            known = {item.id: item for item in rows.known_of(connection, call.rollout_id)}
            self._known[call.rollout_id] = known
            if len(self._known) > KNOWN_ROLLOUTS:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(call.rollout_id)
        return known

    def _number(self, connection: sqlite3.Connection) -> int:
        number = rows.next_number(connection) if self._next_number is None else self._next_number
        self._next_number = number + 1
        return number

    def calls(self, rollout_id: str) -> list[Call]:
        """The calls of a rollout in order of arrival."""
        with self._database.read() as connection:
            return rows.calls_of(connection, [rollout_id])[rollout_id]

    # forgetting

    def forget(self, *, subject: str | None = None, rollout_ids: Iterable[str] = ()) -> Forgotten:
        """Delete closed rollouts with all that was kept of them: those about a subject, and these. Nothing of them
        stays in the file."""
        with self._database.write() as connection:
            about = [] if subject is None else forgetting.of_subject(connection, forgetting.subject_digest(subject))
            forgotten = forgetting.forget(connection, [*about, *rollout_ids])
        for rollout_id in forgotten.rollouts:
            self._known.pop(rollout_id, None)
        self._database.wipe()  # even if there was none: the last time it may have failed here
        return forgotten

    def forget_before(self, seconds: float) -> Forgotten:
        """Delete the first closed rollouts that ended before a time (seconds since the epoch); see ``forget``.

        A thousand at the most. The room in the file is used again: it is not rewritten.
        """
        with self._database.write() as connection:
            return forgetting.forget(connection, forgetting.finished_before(connection, seconds))

    # steps

    def record_step(self, policy: str, step: int, outcome: Mapping[str, Any]) -> None:
        """Write a step's outcome ({"kind", "version", "metrics", "tokens": {rollout id: […]}, …}); once per step."""
        rest = {key: value for key, value in outcome.items() if key != "tokens"}
        with self._database.write() as connection:
            done = connection.execute(
                "INSERT INTO steps (policy, step, kind, version, outcome_json, recorded) VALUES (?, ?, ?, ?, ?, ?)"
                " ON CONFLICT DO NOTHING",
                (policy, step, str(rest.get("kind", "")), rest.get("version"), pack_json(rest), time.time()),
            )
            if done.rowcount:
                connection.executemany(
                    "INSERT OR REPLACE INTO trained (rollout_id, policy, step, calls_json) VALUES (?, ?, ?, ?)",
                    [(key, policy, step, pack_json(value)) for key, value in dict(outcome.get("tokens") or {}).items()],
                )

    def step(self, policy: str, step: int) -> dict[str, Any] | None:
        """A step's outcome as recorded, or None."""
        with self._database.read() as connection:
            row = connection.execute(
                "SELECT outcome_json FROM steps WHERE policy = ? AND step = ?", (policy, step)
            ).fetchone()
            if row is None:
                return None
            trained = connection.execute(
                "SELECT rollout_id, calls_json FROM trained WHERE policy = ? AND step = ? ORDER BY rollout_id",
                (policy, step),
            ).fetchall()
        return {**unpack_json(row[0]), "tokens": {item[0]: unpack_json(item[1]) for item in trained}}

    def steps(self, policy: str) -> list[dict[str, Any]]:
        """All outcomes of a policy in order, each with its ``step``, without the lists of tokens."""
        with self._database.read() as connection:
            found = connection.execute(
                "SELECT step, outcome_json FROM steps WHERE policy = ? ORDER BY step", (policy,)
            ).fetchall()
        return [{**unpack_json(row[1]), "step": row[0]} for row in found]

    def drop_steps(self, policy: str, *, from_step: int) -> int:
        """Forget the steps from a number on (their adapter versions are gone); returns how many."""
        with self._database.write() as connection:
            connection.execute("DELETE FROM trained WHERE policy = ? AND step >= ?", (policy, from_step))
            return connection.execute("DELETE FROM steps WHERE policy = ? AND step >= ?", (policy, from_step)).rowcount

    def trained(self, rollout_id: str) -> list[dict[str, Any]]:
        """What was trained of a rollout: [{"policy", "step", "calls": [{"call", "choice", "trained", …}]}]."""
        with self._database.read() as connection:
            found = connection.execute(
                "SELECT policy, step, calls_json FROM trained WHERE rollout_id = ? ORDER BY step", (rollout_id,)
            ).fetchall()
        return [{"policy": row[0], "step": row[1], "calls": unpack_json(row[2])} for row in found]

    def counts(self) -> dict[str, int]:
        """How many rollouts are open, closed and faulty; how many calls there are, drifted or excluded."""
        with self._database.read() as connection:
            rollouts = connection.execute(
                "SELECT count(*) - coalesce(sum(closed), 0), coalesce(sum(closed), 0), count(fault) FROM rollouts"
            ).fetchone()
            calls = connection.execute(
                "SELECT count(*), count(excluded), coalesce(sum(drifted), 0), coalesce(sum(status = 'error'), 0),"
                " coalesce(sum(status = 'open'), 0) FROM calls"
            ).fetchone()
        names = ("open", "closed", "faulty", "calls", "excluded", "drifted", "errors", "unfinished")
        return dict(zip(names, (*rollouts, *calls), strict=True))


def _check_names(given: Mapping[str, Any], kind: type) -> None:
    """What a signature would do: Unpack is for type checkers only."""
    unknown = given.keys() - kind.__annotations__.keys()
    if unknown:
        raise TypeError(f"{kind.__name__} has no {', '.join(sorted(unknown))}")


def _insert_token(
    connection: sqlite3.Connection, kind: TokenKind, digest: str, rollout_id: str | None, policy: str | None
) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO tokens (digest, kind, rollout_id, policy, created) VALUES (?, ?, ?, ?, ?)",
        (digest, kind, rollout_id, policy, time.time()),
    )


def _closed(connection: sqlite3.Connection, rollout_id: str) -> bool | None:
    """Whether a rollout is closed; None if there is none."""
    row = connection.execute("SELECT closed FROM rollouts WHERE id = ?", (rollout_id,)).fetchone()
    return None if row is None else bool(row[0])


def _rollout_row(connection: sqlite3.Connection, rollout_id: str) -> sqlite3.Row | None:
    row: sqlite3.Row | None = connection.execute("SELECT * FROM rollouts WHERE id = ?", (rollout_id,)).fetchone()
    return row
