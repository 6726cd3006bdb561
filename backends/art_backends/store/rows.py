"""Records to rows and back: calls with their choices, rollouts with their outcome.

Columns hold what is filtered and counted by; the rest of a record stands in one compressed JSON column, so that a new
field of the vocabulary needs no migration. A call stands there as what it adds to an earlier one (``deltas``). It
refuses to open connections or transactions of its own.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from art_backends.errors import StoreError
from art_backends.store.codec import pack_floats, pack_ids, pack_json, unpack_floats, unpack_ids, unpack_json
from art_backends.store.database import ConflictError
from art_backends.store.deltas import Delta, Known, choose, keeps
from art_backends.trajectories import Call, Choice, Rollout

_CALL_COLUMNS = ("id", "rollout_id", "sequence", "status", "version", "drifted", "excluded", "started", "finished")
_CALL_REST = frozenset(Call.model_fields) - {*_CALL_COLUMNS, "request", "prompt_token_ids", "choices"}
_ROLLOUT_COLUMNS = ("id", "policy", "version", "purpose", "scenario_id", "step", "sample", "reward", "fault", "subject")
BATCH = 500  # ids per IN (...): well under SQLite's limit of bound values


def insert_rollout(connection: sqlite3.Connection, rollout: Rollout) -> None:
    connection.execute(
        "INSERT INTO rollouts (id, policy, version, purpose, scenario_id, scenario_json, step, group_name, sample,"
        " opened, subject) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            rollout.id,
            rollout.policy,
            rollout.version,
            rollout.purpose.value,
            rollout.scenario_id,
            pack_json(rollout.scenario),
            rollout.step,
            rollout.group,
            rollout.sample,
            rollout.opened,
            rollout.subject,
        ),
    )


def rollout_of(row: sqlite3.Row, calls: Sequence[Call] = ()) -> Rollout:
    result = unpack_json(row["result_json"]) if row["result_json"] is not None else {}
    return Rollout(
        **{name: row[name] for name in _ROLLOUT_COLUMNS},
        scenario=unpack_json(row["scenario_json"]),
        group=row["group_name"],
        closed=bool(row["closed"]),
        opened=row["opened"],
        finished=row["finished"],
        calls=list(calls),
        **result,
    )


def write_call(connection: sqlite3.Connection, call: Call, earlier: Sequence[Known] = ()) -> Known:
    """Insert the call, or replace the one with its id, choices included, as the difference to one of ``earlier``.

    Returns what later calls need to stand on it. ConflictError if it is replaced by a call on which those that
    stand on it cannot stand.
    """
    number = _number(connection, call, earlier)
    known = Known.of(number, call)
    delta = choose(known, earlier, call.continues)
    facts = call.model_dump(mode="json", include=set(_CALL_REST))
    connection.execute(
        "INSERT INTO calls (number, id, rollout_id, sequence, status, version, drifted, excluded, started, finished,"
        " request_json, prompt_token_ids, facts_json, base, base_choice, shared_ids, shared_messages)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
        " ON CONFLICT (id) DO UPDATE SET rollout_id = excluded.rollout_id, sequence = excluded.sequence,"
        " status = excluded.status, version = excluded.version, drifted = excluded.drifted,"
        " excluded = excluded.excluded, started = excluded.started, finished = excluded.finished,"
        " request_json = excluded.request_json, prompt_token_ids = excluded.prompt_token_ids,"
        " facts_json = excluded.facts_json, base = excluded.base, base_choice = excluded.base_choice,"
        " shared_ids = excluded.shared_ids, shared_messages = excluded.shared_messages",
        (
            number,
            call.id,
            call.rollout_id,
            call.sequence,
            call.status.value,
            call.version,
            call.drifted,
            call.excluded,
            call.started,
            call.finished,
            pack_json(delta.request(call.request)),
            pack_ids(call.prompt_token_ids[delta.ids :]),
            pack_json(facts),
            delta.base,
            delta.choice,
            delta.ids,
            delta.messages,
        ),
    )
    connection.execute("DELETE FROM choices WHERE call = ?", (number,))
    connection.executemany(
        "INSERT INTO choices (call, position, choice_index, finish_reason, message_json, token_ids, logprobs)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        [
            (
                number,
                position,
                choice.index,
                choice.finish_reason,
                pack_json(choice.message),
                pack_ids(choice.token_ids),
                pack_floats(choice.logprobs),
            )
            for position, choice in enumerate(call.choices)
        ],
    )
    return known


def _number(connection: sqlite3.Connection, call: Call, earlier: Sequence[Known]) -> int:
    """The call's number: the one it has, or the next."""
    row = connection.execute("SELECT number FROM calls WHERE id = ?", (call.id,)).fetchone()
    if row is None:
        return int(connection.execute("SELECT coalesce(max(number), 0) + 1 FROM calls").fetchone()[0])
    number = int(row[0])
    if connection.execute("SELECT 1 FROM calls WHERE base = ? LIMIT 1", (number,)).fetchone():
        written = next((other for other in earlier if other.number == number), None)
        if written is None or not keeps(written, Known.of(number, call)):
            raise ConflictError(
                f"call {call.id} is written again with other tokens or messages, which later calls keep"
            )
    return number


def known_of(connection: sqlite3.Connection, rollout_id: str) -> list[Known]:
    """What the calls of a rollout offer to later ones, in the order they were first written."""
    return [Known.of(number, call) for number, call in sorted(_numbered(connection, [rollout_id]).items())]


def calls_of(connection: sqlite3.Connection, rollout_ids: Iterable[str]) -> dict[str, list[Call]]:
    """The calls of each rollout, in order of arrival."""
    wanted = list(rollout_ids)
    found: dict[str, list[Call]] = {rollout_id: [] for rollout_id in wanted}
    for start in range(0, len(wanted), BATCH):
        numbered = _numbered(connection, wanted[start : start + BATCH])
        for _, call in sorted(numbered.items(), key=lambda item: (item[1].sequence, item[0])):
            if call.rollout_id is not None:
                found[call.rollout_id].append(call)
    return found


def _numbered(connection: sqlite3.Connection, batch: Sequence[str]) -> dict[int, Call]:
    """The calls of at most BATCH rollouts by number. A base has a smaller number and is of the same rollout."""
    marks = ", ".join("?" * len(batch))
    choices: dict[int, list[Choice]] = {}
    for row in connection.execute(
        "SELECT choices.* FROM choices JOIN calls ON calls.number = choices.call"  # noqa: S608  only marks
        f" WHERE calls.rollout_id IN ({marks}) ORDER BY choices.call, choices.position",
        batch,
    ):
        choices.setdefault(row["call"], []).append(_choice_of(row))
    found: dict[int, Call] = {}
    for row in connection.execute(
        f"SELECT * FROM calls WHERE rollout_id IN ({marks}) ORDER BY number",  # noqa: S608  only marks
        batch,
    ):
        found[row["number"]] = _call_of(row, choices.get(row["number"], []), found)
    return found


def _choice_of(row: sqlite3.Row) -> Choice:
    return Choice(
        index=row["choice_index"],
        finish_reason=row["finish_reason"],
        message=unpack_json(row["message_json"]),
        token_ids=unpack_ids(row["token_ids"]),
        logprobs=unpack_floats(row["logprobs"]),
    )


def _call_of(row: sqlite3.Row, choices: list[Choice], earlier: Mapping[int, Call]) -> Call:
    columns: dict[str, Any] = {name: row[name] for name in _CALL_COLUMNS}
    columns["drifted"] = bool(columns["drifted"])
    delta = Delta(row["base"], row["base_choice"], row["shared_ids"], row["shared_messages"])
    base = earlier.get(row["base"])
    if row["base"] is not None and base is None:
        raise StoreError(f"the store holds a damaged row: call {row['id']} stands on one that is not there")
    request, ids = delta.restored(unpack_json(row["request_json"]), unpack_ids(row["prompt_token_ids"]), base)
    return Call(
        **columns,
        request=request,
        prompt_token_ids=ids,
        choices=choices,
        **unpack_json(row["facts_json"]),
    )
