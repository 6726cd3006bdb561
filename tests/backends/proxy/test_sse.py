"""The event splitter against cuts at every place and against noise."""

from itertools import pairwise

import pytest
from art_backends.proxy.sse import Event, EventTooLargeError, Splitter, encode, encode_comment
from hypothesis import given
from hypothesis import strategies as st

TEXT = (
    '\ufeff: hello\n\ndata: {"a": "é😀"}\n\nevent: error\r\ndata: one\r\ndata: two\r\n\r\nid: 7\nretry: 1\n\n'
    "data:no space\r\rdata\n\nevent: lost\n\ndata: [DONE]\n\ndata: never ended\n"
).encode()
EVENTS = [
    Event(None, comment=b" hello"),
    Event('{"a": "é😀"}'.encode()),
    Event(b"one\ntwo", b"error"),
    Event(b"no space"),
    Event(b""),
    Event(b"[DONE]"),
]


def split(reads: list[bytes]) -> list[Event]:
    splitter = Splitter()
    return [event for read in reads for event in splitter.feed(read)]


def test_one_read() -> None:
    assert split([TEXT]) == EVENTS


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_any_size_of_read(size: int) -> None:
    assert split([TEXT[i : i + size] for i in range(0, len(TEXT), size)]) == EVENTS


@given(st.lists(st.integers(0, len(TEXT)), max_size=8))
def test_any_cuts(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(TEXT)]
    assert split([TEXT[a:b] for a, b in pairwise(places)]) == EVENTS


@given(st.lists(st.binary(max_size=40), max_size=10))
def test_noise_is_no_crash(reads: list[bytes]) -> None:
    whole = split([b"".join(reads)])
    assert split(reads) == whole


@given(st.lists(st.text(st.characters(blacklist_characters="\r\n", blacklist_categories=["Cs"])), max_size=5))
def test_what_is_encoded_is_read_again(texts: list[str]) -> None:
    events = split([encode(text.encode()) for text in texts])
    assert [event.data for event in events] == [text.encode() for text in texts]


def test_names_and_comments_are_encoded() -> None:
    assert split([encode(b"x", b"error"), encode_comment(b" ping")]) == [
        Event(b"x", b"error"),
        Event(None, b"", b" ping"),
    ]


def test_an_event_without_end_is_bounded() -> None:
    splitter = Splitter(limit=1000)
    splitter.feed(b"data: " + b"x" * 900)
    with pytest.raises(EventTooLargeError):
        splitter.feed(b"x" * 100)
    splitter = Splitter(limit=1000)
    for _ in range(100):  # many events in many reads are no large event
        splitter.feed(b"data: " + b"x" * 50 + b"\n\ndata: y")
        splitter.feed(b"\n\n")
