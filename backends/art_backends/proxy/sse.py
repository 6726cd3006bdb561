"""Server-sent events, incrementally: bytes in, whole events out.

Follows the standard's line rules (LF, CRLF or CR; comments; several data lines; a leading byte order mark) and does
not care how the bytes were cut: in the middle of a character, of a line end, of an event.

It refuses to know what the data means, and events beyond a size.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_LINE_END = re.compile(rb"\r\n|\n|\r")
DONE = b"[DONE]"


class Event(NamedTuple):
    """One event. ``data`` is None for a comment, which then stands in ``comment``."""

    data: bytes | None
    name: bytes = b""
    comment: bytes = b""


class EventTooLargeError(ValueError):
    """An event exceeds the allowed size."""


class Splitter:
    """Feed it reads, get events. An event that was begun but never ended is not an event."""

    def __init__(self, limit: int = 64 * 1024 * 1024) -> None:
        self._limit = limit
        self._tail: list[bytes] = []  # pieces of a line that has not ended
        self._size = 0  # of the event so far
        self._data: list[bytes] = []
        self._name = b""
        self._started = False
        self._skip_newline = False  # the last read ended in CR: an LF that follows belongs to it

    def feed(self, read: bytes) -> list[Event]:
        """Events that this read completes."""
        if self._skip_newline and read:
            self._skip_newline = False
            if read[:1] == b"\n":
                read = read[1:]
        if not read:
            return []
        if read.endswith(b"\r"):
            self._skip_newline = True
        pieces = _LINE_END.split(read)
        self._size += len(read)
        events: list[Event] = []
        if len(pieces) == 1:
            self._tail.append(read)
        else:
            self._tail.append(pieces[0])
            pieces[0] = b"".join(self._tail)
            last = pieces.pop()
            self._tail = [last] if last else []
            for line in pieces:
                event = self._line(line)
                if event is not None:
                    events.append(event)
            if events:
                self._size = len(last) + sum(map(len, self._data))
        if self._size > self._limit:
            raise EventTooLargeError(f"an event of the stream exceeds {self._limit} bytes")
        return events

    def _line(self, line: bytes) -> Event | None:
        if not self._started:
            self._started = True
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line:
            if not self._data:
                self._name = b""
                return None
            event = Event(b"\n".join(self._data), self._name)
            self._data, self._name = [], b""
            return event
        if line[:1] == b":":
            return Event(None, comment=line[1:])
        field, _, value = line.partition(b":")
        if value[:1] == b" ":
            value = value[1:]
        if field == b"data":
            self._data.append(value)
        elif field == b"event":
            self._name = value
        return None


def encode(data: bytes, name: bytes = b"") -> bytes:
    """One event as bytes. ``data`` must not contain line ends (JSON never does)."""
    if name:
        return b"event: " + name + b"\ndata: " + data + b"\n\n"
    return b"data: " + data + b"\n\n"


def encode_comment(comment: bytes) -> bytes:
    """A comment as bytes: what keeps a connection alive."""
    return b":" + comment + b"\n\n"
