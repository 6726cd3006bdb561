"""Token ids into text as they arrive: whole characters only, special tokens left out, cut at stop strings.

``Vocabulary`` wraps one tokenizer; ``Detokenizer`` turns one row's ids into text piece by piece (the pieces joined
are what decoding all ids at once gives); ``StopMatcher`` holds back text that may yet become a stop string.

It refuses to know about tools, templates or HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

_REPLACEMENT = "\ufffd"
_LONGEST_PARTIAL = 3  # bytes of a character that is not complete yet
_MARKUP = re.compile(r"<[^\s<>]+>|\[[^\s\[\]]+\]")


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """The printable characters by which byte-level BPE vocabularies spell bytes."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in plain}
    for count, byte in enumerate(byte for byte in range(256) if byte not in set(plain)):
        table[chr(256 + count)] = byte
    return table


class Vocabulary:
    """What the engine's HTTP face needs to know about a tokenizer (a fast transformers tokenizer).

    ``size`` is the model's vocabulary (embedding rows), which may exceed the tokenizer's; ``eos_token_ids`` are all
    tokens that end an answer, those of the model's generation settings included.
    """

    def __init__(self, tokenizer: Any, *, size: int | None = None, eos_token_ids: Iterable[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.size = size if size is not None else len(tokenizer)
        own = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
        self.eos_token_ids = frozenset((*own, *eos_token_ids))
        self.added: dict[int, Any] = dict(tokenizer.added_tokens_decoder)
        self._pieces: dict[int, tuple[str, list[int]]] = {}  # of single tokens, as they come up
        self._byte_level = "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder)
        special = {index for index, token in self.added.items() if token.special} | set(tokenizer.all_special_ids)
        # tags that a parser must see stay in the text even where a tokenizer calls them special
        self.hidden = frozenset(index for index in special if "tool_call" not in self.piece(index)) | self.eos_token_ids

    @property
    def control_strings(self) -> list[str]:
        """Every string that the tokenizer turns into a control token wherever it stands in a text, sorted."""
        found = {str(self.piece(index)) for index in self.hidden}
        for token in self.added.values():
            if token.special or _MARKUP.fullmatch(token.content):
                found.add(token.content)
        return sorted(found - {""})

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [int(index) for index in self.tokenizer.encode(text, add_special_tokens=add_special_tokens)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids, special tokens included, nothing tidied."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def piece(self, index: int) -> str:
        """The text of one token alone (a replacement character where it is no whole character)."""
        return self._piece(index)[0]

    def piece_bytes(self, index: int) -> list[int]:
        """The bytes of one token alone: exact for byte-level vocabularies, else those of its text."""
        return self._piece(index)[1]

    def _piece(self, index: int) -> tuple[str, list[int]]:
        known = self._pieces.get(index)
        if known is None:
            if index in self.added:
                text = str(self.added[index].content)
            else:
                text = self.decode([index]) if index < len(self.tokenizer) else ""
            known = self._pieces[index] = (text, self._bytes(index, text))
        return known

    def _bytes(self, index: int, text: str) -> list[int]:
        if self._byte_level and index not in self.added and index < len(self.tokenizer):
            table = _byte_of_char()
            spelled = str(self.tokenizer.convert_ids_to_tokens(index))
            if all(char in table for char in spelled):
                return [table[char] for char in spelled]
        return list(text.encode("utf-8", errors="replace"))

    def piece_str(self, index: int) -> str | None:
        """How the vocabulary itself spells this token; None beyond the tokenizer's vocabulary."""
        return None if index >= len(self.tokenizer) else str(self.tokenizer.convert_ids_to_tokens(index))


class Detokenizer:
    """One row's ids into text. ``push`` gives what can be said now, ``flush`` the rest."""

    def __init__(self, vocabulary: Vocabulary, *, skip_special_tokens: bool = True) -> None:
        self._vocabulary = vocabulary
        self._hidden = vocabulary.hidden if skip_special_tokens else frozenset[int]()
        self._ids: list[int] = []  # the window: a few tokens of context, then those not wholly said
        self._fresh = 0  # index in the window of the first token that is not context
        self._said = 0  # characters of the window's text already given

    def push(self, index: int) -> str:
        if index in self._hidden or index >= len(self._vocabulary.tokenizer):
            return self.flush()
        self._ids.append(index)
        text = self._vocabulary.decode(self._ids)
        end = len(text)
        while end > max(self._said, len(text) - _LONGEST_PARTIAL) and text[end - 1] == _REPLACEMENT:
            end -= 1
        piece = text[self._said : end]
        if end == len(text) and end > self._said:
            # everything is said: this token becomes the context of the next ones
            self._ids = self._ids[self._fresh :]
            self._fresh = len(self._ids)
            self._said = len(self._vocabulary.decode(self._ids))
        elif piece:
            self._said = end
        return piece

    def flush(self) -> str:
        """What is held back, a broken character as the replacement character; begins anew after it."""
        if len(self._ids) == self._fresh:
            return ""
        piece = self._vocabulary.decode(self._ids)[self._said :]
        self._ids = self._ids[self._fresh :]
        self._fresh = len(self._ids)
        self._said = len(self._vocabulary.decode(self._ids))
        return piece


class StopMatcher:
    """Finds the stop string that is complete first in text that arrives in pieces; ``hit`` is the one found."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """Text that is safe to show. After a hit: only what stood before it, then nothing."""
        if not self._stops or self.hit is not None:
            return "" if self.hit is not None else text
        self._held += text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, at, self.hit = min(found)
            safe, self._held = self._held[:at], ""
            return safe
        keep = max(overlap(self._held, stop) for stop in self._stops)
        safe, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return safe

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def overlap(text: str, target: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``target``."""
    for size in range(min(len(text), len(target) - 1), 0, -1):
        if target.startswith(text[-size:]):
            return size
    return 0
