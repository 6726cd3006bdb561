"""A call as what it adds to an earlier call of its rollout.

An agent sends its whole history with every request, so a rollout's calls say the same things again and again. A row
keeps the number of an earlier call (its *base*), how much of the base's tokens and messages it begins with, which of
the request's other keys are the same, and then only what is new: the store grows with what is new in a call.

It refuses to guess: what is shared is shared byte for byte (1, 1.0 and true are three things).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from art_backends.store.codec import json_text
from art_backends.trajectories import Call

LOOK = 8  # earlier calls that are tried as base, besides the one that the call is known to continue


@dataclass(frozen=True, slots=True)
class Known:
    """As much of a written call as later ones need to stand on it; texts by their digests."""

    number: int
    id: str
    prompt: list[int]
    choices: list[list[int]]
    messages: list[bytes]
    rest: dict[str, bytes]

    @classmethod
    def of(cls, number: int, call: Call) -> Known:
        messages = call.request.get("messages")
        return cls(
            number,
            call.id,
            call.prompt_token_ids,
            [choice.token_ids for choice in call.choices],
            [_digest(message) for message in messages] if isinstance(messages, list) else [],
            {key: _digest(value) for key, value in call.request.items() if key != "messages"},
        )


@dataclass(frozen=True, slots=True)
class Delta:
    """What a call shares with its base. ``choice`` is the position of the base's answer that the tokens go on with,
    None if they share a part of its prompt only. Without a base everything is new."""

    base: int | None = None
    choice: int | None = None
    ids: int = 0
    messages: int = 0
    same: list[str] = field(default_factory=list)

    def request(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The request as it is kept: without what is shared."""
        if self.base is None:
            return dict(request)
        body = {key: value for key, value in request.items() if key not in self.same}
        if self.messages:
            body["messages"] = request["messages"][self.messages :]
        return {"body": body, "same": self.same}

    def restored(self, kept: dict[str, Any], ids: list[int], base: Call | None) -> tuple[dict[str, Any], list[int]]:
        """(request, prompt ids) from what was kept and the base's call."""
        if self.base is None or base is None:
            return kept, ids
        request = {key: base.request[key] for key in kept["same"]} | kept["body"]
        if self.messages:
            request["messages"] = base.request["messages"][: self.messages] + request["messages"]
        before = base.prompt_token_ids
        if self.choice is not None:
            before = before + base.choices[self.choice].token_ids
        return request, before[: self.ids] + ids


def choose(call: Known, earlier: Sequence[Known], continues: str | None) -> Delta:
    """The difference to whichever earlier call shares most with this one."""
    candidates = [other for other in earlier if other.number < call.number]
    recent = candidates[-LOOK:]
    recent += [other for other in candidates[:-LOOK] if other.id == continues]
    best = Delta()
    for other in reversed(recent):
        found = _delta(call, other)
        if (found.ids, found.messages, len(found.same)) > (best.ids, best.messages, len(best.same)):
            best = found
    return best


def keeps(old: Known, new: Known) -> bool:
    """Whether what stands on ``old`` can stand on ``new``, the same call written again."""
    return (
        new.prompt[: len(old.prompt)] == old.prompt
        and (new.prompt == old.prompt or not old.choices)
        and new.choices[: len(old.choices)] == old.choices
        and new.messages == old.messages
        and new.rest == old.rest
    )


def _delta(call: Known, other: Known) -> Delta:
    ids, choice = _common(call.prompt, other.prompt), None
    if ids == len(other.prompt):
        for position, sampled in enumerate(other.choices):
            more = _common(call.prompt[ids:], sampled)
            if len(other.prompt) + more > ids:
                ids, choice = len(other.prompt) + more, position
    messages = _common(call.messages, other.messages)
    same = sorted(key for key, digest in call.rest.items() if other.rest.get(key) == digest)
    return Delta(other.number, choice, ids, messages, same)


def _common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Length of the common beginning, by halving: slices compare faster than elements one by one."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _digest(value: Any) -> bytes:
    return blake2b(json_text(value), digest_size=16).digest()
