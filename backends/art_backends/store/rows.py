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
from art_backends.trajectories import Call, Choice, Record, Rollout

_CALL_COLUMNS = ("id", "rollout_id", "sequence", "status", "version", "drifted", "excluded", "started", "finished")
_CALL_REST = frozenset(Call.model_fields) - {*_CALL_COLUMNS, "request", "prompt_token_ids", "choices"}
_USUAL = {name: Call.model_fields[name].get_default(call_default_factory=True) for name in _CALL_REST}
_RECORDS = {name for name, value in _USUAL.items() if isinstance(value, Record)}
_WRITTEN = [*_CALL_COLUMNS, "request_json", "prompt_token_ids", "facts_json"]
_WRITTEN += ["base", "base_choice", "shared_ids", "shared_messages"]
_INSERT = (
    f"INSERT INTO calls (number, {', '.join(_WRITTEN)})"  # noqa: S608  literals all
    f" VALUES (:number, {', '.join(':' + name for name in _WRITTEN)})"
)
_UPDATE = f"UPDATE calls SET {', '.join(f'{name} = :{name}' for name in _WRITTEN)} WHERE number = :number"  # noqa: S608
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


def write_call(
    connection: sqlite3.Connection, call: Call, number: int, earlier: Sequence[Known] = (), *, again: Known | None
) -> Known:
    """Write the call, choices included, under its number, as the difference to one of ``earlier``.

    ``again``: what was known of it, if it is written already; then it is replaced. Returns what later calls need to
    stand on it. ConflictError if those that stand on it already cannot stand on the new one.
    """
    known = Known.of(number, call)
    if again is not None and not keeps(again, known) and _is_base(connection, number):
        raise ConflictError(f"call {call.id} is written again with other tokens or messages, which later calls keep")
    delta = choose(known, earlier, call.continues)
    connection.execute(
        _INSERT if again is None else _UPDATE,
        {
            "number": number,
            **{name: getattr(call, name) for name in _CALL_COLUMNS},
            "status": call.status.value,
            "request_json": pack_json(delta.request(call.request)),
            "prompt_token_ids": pack_ids(call.prompt_token_ids[delta.ids :]),
            "facts_json": pack_json(_facts(call)),
            "base": delta.base,
            "base_choice": delta.choice,
            "shared_ids": delta.ids,
            "shared_messages": delta.messages,
        },
    )
    if again is not None and again.choices:
        connection.execute("DELETE FROM choices WHERE call = ?", (number,))
    for position, choice in enumerate(call.choices):
        connection.execute(
            "INSERT INTO choices (call, position, choice_index, finish_reason, message_json, token_ids, logprobs)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                number,
                position,
                choice.index,
                choice.finish_reason,
                pack_json(choice.message),
                pack_ids(choice.token_ids),
                pack_floats(choice.logprobs),
            ),
        )
    return known


def _facts(call: Call) -> dict[str, Any]:
    """The fields without a column of their own, but for those that have their usual value."""
    found = {name: getattr(call, name) for name in _CALL_REST}
    facts = {name: value for name, value in found.items() if value != _USUAL[name]}
    for name in _RECORDS & facts.keys():
        usual = vars(_USUAL[name])
        facts[name] = {key: value for key, value in vars(facts[name]).items() if value != usual[key]}
    return facts


def _is_base(connection: sqlite3.Connection, number: int) -> bool:
    return connection.execute("SELECT 1 FROM calls WHERE base = ? LIMIT 1", (number,)).fetchone() is not None


def next_number(connection: sqlite3.Connection) -> int:
    """The first number that no call has, nor any after it."""
    return int(connection.execute("SELECT coalesce(max(number), 0) + 1 FROM calls").fetchone()[0])


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
