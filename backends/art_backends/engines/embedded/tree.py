"""The prefix cache: a tree of segments, with the slots of running and finished rows as leaves.

A prompt that begins with cached tokens computes only the rest. A prompt that begins with everything a finished row
holds (the next turn of a rollout) takes that row's slot over, without a copy. Runs of tokens that several prompts
share become segments, computed once, also when the prompts arrive one after the other. See ``kv`` for the bounds.

It refuses to know about models and adapters: there is one root per key, and keys never share anything.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from art_backends.engines.embedded.kv import Arena, Limits, Segment, Slot


@dataclass(slots=True)
class Place:
    """Where a row stands: its ``slot`` (which may already hold tokens) and the tokens ``todo``, to be computed next.

    ``draft`` are guessed tokens after those, computed in the same pass; from then on they are ``ahead``: their keys and
    values stand behind the slot's tokens, which they enter when they turn out to be right.
    """

    slot: Slot
    todo: list[int]
    draft: list[int] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)

    @property
    def fresh(self) -> list[int]:
        """What the next pass computes."""
        return [*self.todo, *self.draft]

    @property
    def size(self) -> int:
        """Number of ``fresh`` tokens."""
        return len(self.todo) + len(self.draft)

    def computed(self) -> None:
        """A pass has computed ``fresh``."""
        self.slot.tokens.extend(self.todo)
        self.todo, self.ahead, self.draft = [], self.draft, []

    def push(self, token: int) -> bool:
        """The row's next token; whether what follows it was computed ahead."""
        if self.ahead and self.ahead[0] == token:
            self.slot.tokens.append(self.ahead.pop(0))
            return True
        self.ahead = []
        self.todo.append(token)
        return False

    @property
    def parent(self) -> Segment:
        assert self.slot.parent is not None
        return self.slot.parent


class Tree:
    """The prefix cache. Every method is called from the engine's thread only."""

    def __init__(self, arena: Arena, limits: Limits) -> None:
        self.arena = arena
        self.limits = limits
        self.roots: dict[Hashable, Segment] = {}
        self.tokens = 0  # in segments
        self.capacity = max(1, min(limits.cache_tokens, limits.cache_bytes // arena.shape.token_bytes))
        self.hits = 0  # prompt tokens that did not have to be computed
        self._clock = count(1)
        self._slots = [Slot(index) for index in range(arena.slots)]
        self._placed: list[Place] = []

    # ------------------------------------------------------------------ placing a prompt

    def place(self, key: Hashable, ids: tuple[int, ...]) -> Place:
        """Find the longest computed prefix of ``ids``, make room for the rest. ``settle`` must follow the last one.

        The last token is always left to compute: its logits are wanted.
        """
        node, slot, at = self._match(key, ids)
        self.hits += at
        todo = list(ids[at:])
        if slot is not None:
            slot.busy = True
            if len(slot.tokens) + len(todo) <= self.arena.slot_tokens:
                return self._touch(Place(slot, todo))
            node = self.spill(slot)
        if len(todo) - 1 >= self.limits.min_shared:
            for start in range(0, len(todo) - 1, self.limits.piece):
                node = self._add(tuple(todo[start : min(start + self.limits.piece, len(todo) - 1)]), node)
            todo = todo[-1:]
        if slot is None:
            slot = self._take_slot()
        self._hang(slot, node)
        place = Place(slot, todo)
        if node.k is None and node.parent is not None:
            self._placed.append(place)
        return self._touch(place)

    def _match(self, key: Hashable, ids: tuple[int, ...]) -> tuple[Segment, Slot | None, int]:
        """The node below which the rest of ``ids`` goes, the slot to take over if there is one, and where it starts."""
        node = self.roots.setdefault(key, Segment((), None, 0))
        at, limit = 0, len(ids) - 1
        while at < limit:
            best: Segment | Slot | None = None
            most = 0
            leaves: list[Segment | Slot] = [*node.children, *node.slots]
            for child in leaves:
                length = _common(child.tokens, ids, at, limit)
                if length > most:
                    best, most = child, length
            if best is None:
                break
            if isinstance(best, Slot) and not best.busy and most == len(best.tokens):
                return node, best, at + most
            if isinstance(best, Segment) and most == len(best.tokens):
                node = best
            elif most >= self.limits.min_shared:
                node = self._split(best, most) if isinstance(best, Segment) else self._copy_prefix(best, most)
            else:
                break
            at += most
        return node, None, at

    def settle(self) -> None:
        """After a wave of ``place``: short runs of tokens that turned out to be one row's alone go into its slot."""
        for place in self._placed:
            node = place.parent
            alone = node.k is None and not node.children and node.slots == [place.slot] and node.parent is not None
            if alone and not place.slot.tokens and len(node.tokens) <= self.limits.fold:
                place.todo[:0] = node.tokens
                assert node.parent is not None
                self._hang(place.slot, node.parent)
                self._drop(node)
        self._placed.clear()

    def pending(self, key: Hashable) -> list[Segment]:
        """Segments that are placed and not yet computed, parents first."""
        found = [node for node in self._walk(key) if node.k is None and node.parent is not None]
        return sorted(found, key=lambda node: node.start)

    # ------------------------------------------------------------------ moving

    def spill(self, slot: Slot) -> Segment:
        """Move what a slot holds into a new segment below its parent; the slot stays, empty, below that."""
        assert slot.parent is not None
        node = self._copy_prefix(slot, len(slot.tokens))
        slot.tokens = []
        self._hang(slot, node)
        return node

    def release(self, slot: Slot, *, keep: bool = True) -> None:
        """A row is done: keep what it computed for its next turn; ``keep=False`` when that is not to be trusted."""
        slot.busy = False
        if not keep:
            self.arena.k[:, slot.index] = 0
            self.arena.v[:, slot.index] = 0
            slot.tokens = []
        slot.used = next(self._clock)
        parent = slot.parent
        if not slot.tokens or parent is None or any(node.k is None for node in parent.path()):
            self._free(slot)
            while parent is not None and parent.parent is not None and parent.k is None and _is_leaf(parent):
                above = parent.parent
                self._drop(parent)
                parent = above

    def forget(self, key: Hashable) -> None:
        """Drop everything of a key; no row of it may be running."""
        for node in list(self._walk(key)):
            for slot in list(node.slots):
                self._free(slot)
            if node.parent is not None:
                self.tokens -= len(node.tokens)
        self.roots.pop(key, None)

    def has_room(self, tokens: int) -> bool:
        """Make room for ``tokens`` more in segments, dropping what was used least recently; False if it cannot."""
        while self.tokens + tokens > self.capacity:
            leaves: list[Segment | Slot] = [slot for slot in self._slots if slot.parent is not None and not slot.busy]
            for key in self.roots:
                leaves.extend(node for node in self._walk(key) if node.parent is not None and _is_leaf(node))
            if not leaves:
                return False
            oldest = min(leaves, key=lambda leaf: leaf.used)
            if isinstance(oldest, Slot):
                self._free(oldest)
            else:
                self._drop(oldest)
        return True

    # ------------------------------------------------------------------ within

    def _walk(self, key: Hashable) -> Iterator[Segment]:
        stack = [self.roots[key]] if key in self.roots else []
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children)

    def _add(self, tokens: tuple[int, ...], parent: Segment) -> Segment:
        node = Segment(tokens, parent, parent.end)
        parent.children.append(node)
        self.tokens += len(tokens)
        return node

    def _drop(self, node: Segment) -> None:
        assert node.parent is not None
        node.parent.children.remove(node)
        self.tokens -= len(node.tokens)

    def _split(self, node: Segment, at: int) -> Segment:
        """Cut a segment in two and return the upper one; ``node`` becomes the lower one, so rows keep their parent.

        The parts are copies, so that dropping one frees its memory.
        """
        assert node.parent is not None
        upper = Segment(node.tokens[:at], node.parent, node.start)
        upper.used = node.used
        node.parent.children[node.parent.children.index(node)] = upper
        upper.children.append(node)
        if node.k is not None and node.v is not None:
            upper.k, upper.v = node.k[:, :at].clone(), node.v[:, :at].clone()
            node.k, node.v = node.k[:, at:].clone(), node.v[:, at:].clone()
        node.tokens = node.tokens[at:]
        node.start += at
        node.parent = upper
        return upper

    def _copy_prefix(self, slot: Slot, length: int) -> Segment:
        assert slot.parent is not None
        node = self._add(tuple(slot.tokens[:length]), slot.parent)
        node.k = self.arena.k[:, slot.index, :length].clone()
        node.v = self.arena.v[:, slot.index, :length].clone()
        node.used = next(self._clock)
        return node

    def _take_slot(self) -> Slot:
        """A free slot, else that of the finished row used least recently, whose tokens go to a segment."""
        slot = next((slot for slot in self._slots if slot.parent is None and not slot.busy), None)
        if slot is None:
            slot = min((slot for slot in self._slots if not slot.busy), key=lambda slot: slot.used)
            if len(slot.tokens) >= self.limits.min_shared:
                stamp = slot.used
                self.spill(slot).used = stamp
            self._free(slot)
        slot.busy = True
        return slot

    def _free(self, slot: Slot) -> None:
        if slot.parent is not None:
            slot.parent.slots.remove(slot)
        slot.parent = None
        slot.tokens = []

    def _hang(self, slot: Slot, parent: Segment) -> None:
        if slot.parent is not None:
            slot.parent.slots.remove(slot)
        slot.parent = parent
        parent.slots.append(slot)

    def _touch(self, place: Place) -> Place:
        stamp = next(self._clock)
        place.slot.used = stamp
        for node in place.parent.path():
            node.used = stamp
        return place


def _is_leaf(node: Segment) -> bool:
    return not node.children and not node.slots


def _common(tokens: Sequence[int], ids: tuple[int, ...], at: int, limit: int) -> int:
    """How many of ``tokens`` stand at ``ids[at:limit]``."""
    most = min(len(tokens), limit - at)
    if most <= 0 or tokens[0] != ids[at]:
        return 0
    low, high = 1, most
    while low < high:  # the longest equal run, by halves: slices compare at C speed
        middle = (low + high + 1) // 2
        if tuple(tokens[low:middle]) == ids[at + low : at + middle]:
            low = middle
        else:
            high = middle - 1
    return low
