"""Attributes replaced so that they can be put back: the original objects, by identity.

It refuses to undo other people's work: an attribute that someone wrapped after us is left as it is (our replacement
stays beneath it, and passes everything through).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_INHERITED = object()


class PatchSet:
    """Replacements of class attributes, restored in reverse order."""

    def __init__(self) -> None:
        self._done: list[tuple[type, str, Any, Any]] = []

    def replace(self, owner: type, name: str, make: Callable[[Any], Any]) -> None:
        """Replace ``owner.name`` by ``make(original)``; one that ``owner`` inherits is replaced for it alone."""
        original = vars(owner).get(name, _INHERITED)
        replacement = make(getattr(owner, name) if original is _INHERITED else original)
        setattr(owner, name, replacement)
        self._done.append((owner, name, original, replacement))

    def restore(self) -> None:
        while self._done:
            owner, name, original, replacement = self._done.pop()
            if vars(owner).get(name) is not replacement:
                continue
            if original is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
