"""Records to rows and back: calls with their choices, rollouts with their outcome.

Columns hold what is filtered and counted by; the rest of a record stands in one compressed JSON column, so that a new
field of the vocabulary needs no migration. It refuses to open connections or transactions of its own.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

from art_backends.store.codec import pack_floats, pack_ids, pack_json, unpack_floats, unpack_ids, unpack_json
from art_backends.trajectories import Call, Choice, Rollout

_CALL_COLUMNS = ("id", "rollout_id", "sequence", "status", "version", "drifted", "excluded", "started", "finished")
_CALL_REST = frozenset(Call.model_fields) - {*_CALL_COLUMNS, "request", "prompt_token_ids", "choices"}
_ROLLOUT_COLUMNS = ("id", "policy", "version", "purpose", "scenario_id", "step", "sample", "reward", "fault")
BATCH = 500  # ids per IN (...): well under SQLite's limit of bound values


def insert_rollout(connection: sqlite3.Connection, rollout: Rollout) -> None:
    connection.execute(
        "INSERT INTO rollouts (id, policy, version, purpose, scenario_id, scenario_json, step, group_name, sample,"
        " opened) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
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


def write_call(connection: sqlite3.Connection, call: Call) -> None:
    """Insert the call, or replace the one with its id, choices included."""
    facts = call.model_dump(mode="json", include=set(_CALL_REST))
    cursor = connection.execute(
        "INSERT INTO calls (id, rollout_id, sequence, status, version, drifted, excluded, started, finished,"
        " request_json, prompt_token_ids, facts_json) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
        " ON CONFLICT (id) DO UPDATE SET rollout_id = excluded.rollout_id, sequence = excluded.sequence,"
        " status = excluded.status, version = excluded.version, drifted = excluded.drifted,"
        " excluded = excluded.excluded, started = excluded.started, finished = excluded.finished,"
        " request_json = excluded.request_json, prompt_token_ids = excluded.prompt_token_ids,"
        " facts_json = excluded.facts_json RETURNING number",
        (
            call.id,
            call.rollout_id,
            call.sequence,
            call.status.value,
            call.version,
            call.drifted,
            call.excluded,
            call.started,
            call.finished,
            pack_json(call.request),
            pack_ids(call.prompt_token_ids),
            pack_json(facts),
        ),
    )
    number = cursor.fetchone()[0]
    cursor.close()
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


def calls_of(connection: sqlite3.Connection, rollout_ids: Iterable[str]) -> dict[str, list[Call]]:
    """The calls of each rollout, in order of arrival."""
    wanted = list(rollout_ids)
    found: dict[str, list[Call]] = {rollout_id: [] for rollout_id in wanted}
    for start in range(0, len(wanted), BATCH):
        batch = wanted[start : start + BATCH]
        marks = ", ".join("?" * len(batch))
        choices: dict[int, list[Choice]] = {}
        for row in connection.execute(
            "SELECT choices.* FROM choices JOIN calls ON calls.number = choices.call"  # noqa: S608  only marks
            f" WHERE calls.rollout_id IN ({marks}) ORDER BY choices.call, choices.position",
            batch,
        ):
            choices.setdefault(row["call"], []).append(_choice_of(row))
        for row in connection.execute(
            f"SELECT * FROM calls WHERE rollout_id IN ({marks}) ORDER BY sequence, number",  # noqa: S608  only marks
            batch,
        ):
            found[row["rollout_id"]].append(_call_of(row, choices.get(row["number"], [])))
    return found


def _choice_of(row: sqlite3.Row) -> Choice:
    return Choice(
        index=row["choice_index"],
        finish_reason=row["finish_reason"],
        message=unpack_json(row["message_json"]),
        token_ids=unpack_ids(row["token_ids"]),
        logprobs=unpack_floats(row["logprobs"]),
    )


def _call_of(row: sqlite3.Row, choices: list[Choice]) -> Call:
    columns: dict[str, Any] = {name: row[name] for name in _CALL_COLUMNS}
    columns["drifted"] = bool(columns["drifted"])
    return Call(
        **columns,
        request=unpack_json(row["request_json"]),
        prompt_token_ids=unpack_ids(row["prompt_token_ids"]),
        choices=choices,
        **unpack_json(row["facts_json"]),
    )
