"""Guesses of a row's next tokens, from what other rows said before and from what the row itself has read and said.

A pass of the model over several tokens of a row costs little more than over one where reading the weights is what
takes the time, and rollouts of one task say much the same: the same tool, the same JSON around its arguments, a value
copied from the prompt. So the engine computes guessed tokens along with the sampled one, then samples at each of them
in turn as it would have, keeps what was guessed right and forgets the rest. What a row says is the same with and
without guesses. (SuffixDecoding, https://arxiv.org/abs/2411.04975, guesses from earlier answers, too.)

A guess is made only while the product of the chances of all its tokens exceeds what computing them costs.

It refuses to know about models: token ids in, token ids out. Called from the engine's thread only.
"""

from __future__ import annotations

from collections.abc import Sequence

MOST = 12  # tokens guessed at once for a row
# A pass of no rows would take as long as 45 rows more (SmolLM2 on two cores with AVX2); chances are overrated where few
# answers were seen, and 8 made the fewest row-passes on the answers of a whole training.
BREAK_EVEN = 8
ORDERS = (6, 3)  # tokens before that a frequency depends on: the longer context first
_CONTEXTS = 100_000  # kept in all; over it the older half goes
_SEEN = 64  # of a context; over it counts are halved, so that they follow a policy that changes
_DOUBT = 0.5  # added to a context's count: what was seen twice is less sure than what was seen often


class Trail:
    """A row's own tokens, and where each pair of neighbours among them stood last."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids  # the row's own list, which grows
        self._after: dict[tuple[int, int], int] = {}
        self._indexed = 1

    def source(self) -> int | None:
        """The place after the last earlier occurrence of the last two tokens."""
        ids = self.ids
        for end in range(self._indexed, len(ids) - 1):  # all pairs but the last one, which is looked for
            self._after[ids[end - 1], ids[end]] = end + 1
        self._indexed = max(self._indexed, len(ids) - 1)
        return self._after.get((ids[-2], ids[-1])) if len(ids) > 1 else None


class Drafts:
    """Frequencies of what follows what in the answers of this engine, of any adapter version."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], dict[int, int]] = {}
        self._copies = [1.0, 2.0]  # right ones and all, older ones fading

    def learn(self, trail: Trail, token: int) -> None:
        """``token`` was sampled after the trail's; it is not in it yet."""
        ids = trail.ids
        for order in ORDERS:
            context = tuple(ids[-order:])
            counts = self._next.get(context)
            if counts is None:
                if len(self._next) >= _CONTEXTS:
                    self._next = dict(list(self._next.items())[_CONTEXTS // 2 :])
                counts = self._next[context] = {}
            counts[token] = counts.get(token, 0) + 1
            if sum(counts.values()) > _SEEN:
                self._next[context] = {key: half for key, count in counts.items() if (half := count // 2)}
        source = trail.source()
        if source is not None:
            right, tried = self._copies
            self._copies = [0.98 * right + (ids[source] == token), 0.98 * tried + 1]

    def guess(self, trail: Trail, most: int, rows: int) -> list[int]:
        """At most ``most`` tokens that likely come next, for a pass of ``rows`` rows.

        A wrong token costs 1 / BREAK_EVEN of an empty pass; a right one spares the row what it bears of one, 1 / rows.
        """
        least = rows / (rows + BREAK_EVEN)
        copying = self._copies[0] / self._copies[1]
        tail = trail.ids[-max(ORDERS) :]
        source = trail.source()
        found: list[int] = []
        chance = 1.0
        while len(found) < most:
            token, share = self._likely(tail)
            if source is not None and source < len(trail.ids) and (token is None or share < copying):
                token, share = trail.ids[source], copying
            chance *= share
            if token is None or chance < least:
                break
            if source is not None:
                follows = source < len(trail.ids) and trail.ids[source] == token
                source = source + 1 if follows else None
            found.append(token)
            tail.append(token)
        return found

    def _likely(self, tail: Sequence[int]) -> tuple[int | None, float]:
        """The most frequent successor of the longest context that is known, and its share."""
        for order in ORDERS:
            counts = self._next.get(tuple(tail[-order:]))
            if counts:
                token = max(counts, key=counts.__getitem__)
                return token, counts[token] / (sum(counts.values()) + _DOUBT)
        return None, 0.0
