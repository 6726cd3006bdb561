"""Text from token ids: whole characters, exact bytes, stop strings wherever tokens break them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from art_backends.engines.embedded.text import Detokenizer, StopMatcher, Vocabulary, overlap
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture(scope="session")
def vocabulary(tokenizer: Any) -> Vocabulary:
    return Vocabulary(tokenizer)


def read(vocabulary: Vocabulary, ids: list[int], **options: Any) -> tuple[list[str], str]:
    detokenizer = Detokenizer(vocabulary, **options)
    pieces = [detokenizer.push(index) for index in ids]
    return pieces, "".join(pieces) + detokenizer.flush()


def test_a_character_comes_when_it_is_whole(vocabulary: Vocabulary) -> None:
    ids = vocabulary.encode("a€😀b")
    pieces, text = read(vocabulary, ids)
    assert text == "a€😀b"
    assert [piece for piece in pieces if piece] == ["a", "€", "😀", "b"]


def test_a_broken_character_is_told_as_such(vocabulary: Vocabulary) -> None:
    euro = vocabulary.encode("€")
    assert read(vocabulary, euro[:2])[1] == "\ufffd"
    assert read(vocabulary, [*euro[:2], *vocabulary.encode("x")])[1] == "\ufffdx"


def test_control_tokens_are_left_out_unless_asked_for(vocabulary: Vocabulary) -> None:
    ids = vocabulary.encode("hello<|im_start|> world<|im_end|>")
    assert read(vocabulary, ids)[1] == "hello world"
    assert read(vocabulary, ids, skip_special_tokens=False)[1] == "hello<|im_start|> world<|im_end|>"


def test_ids_beyond_the_tokenizer_have_no_text(tokenizer: Any) -> None:
    wide = Vocabulary(tokenizer, size=len(tokenizer) + 20)
    beyond = len(tokenizer) + 3
    assert read(wide, [*wide.encode("hello"), beyond, *wide.encode(" world")])[1] == "hello world"
    assert (wide.piece(beyond), wide.piece_bytes(beyond), wide.piece_str(beyond)) == ("", [], None)


def test_any_ids_read_as_decoded_at_once(vocabulary: Vocabulary) -> None:
    ordinary = [index for index in range(len(vocabulary.tokenizer)) if index not in vocabulary.hidden]

    @given(st.lists(st.sampled_from(ordinary), max_size=30))
    def check(ids: list[int]) -> None:
        assert read(vocabulary, ids)[1] == vocabulary.decode(ids)

    check()


def test_any_text_comes_back(vocabulary: Vocabulary) -> None:
    @given(st.text(max_size=20))
    def check(text: str) -> None:
        ids = vocabulary.encode(text)
        if not vocabulary.hidden & set(ids):
            assert read(vocabulary, ids)[1] == text
            assert bytes(byte for index in ids for byte in vocabulary.piece_bytes(index)).decode() == text

    check()


def test_tool_call_tags_stay_in_the_text(new_tokenizer: Callable[..., Any]) -> None:
    tokenizer = new_tokenizer(tags=True)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    vocabulary = Vocabulary(tokenizer)
    assert read(vocabulary, vocabulary.encode("<tool_call>{}</tool_call><|im_end|>"))[1] == "<tool_call>{}</tool_call>"


def test_all_ends_and_control_strings(tokenizer: Any) -> None:
    vocabulary = Vocabulary(tokenizer, eos_token_ids=[3, tokenizer.bos_token_id])
    assert vocabulary.eos_token_ids == {3, tokenizer.bos_token_id, tokenizer.eos_token_id}
    assert {"<|im_start|>", "<|im_end|>", "<|endoftext|>"} <= set(vocabulary.control_strings)


@pytest.mark.parametrize(
    ("pieces", "stops", "said", "hit"),
    [
        (["hello"], [], "hello", None),
        (["hel", "lo"], ["lo"], "hel", "lo"),
        (["a", "b", "c", "d"], ["bc"], "a", "bc"),
        (["a", "b", "x"], ["bc"], "abx", None),
        (["aab"], ["ab"], "a", "ab"),
        (["a", "a", "a", "b"], ["aab"], "a", "aab"),
        (["xENDyEND"], ["END"], "x", "END"),
        (["one two"], ["two", "one"], "", "one"),
        (["abc"], ["c", "bc"], "a", "bc"),
        (["abc"], ["abc", "b"], "a", "b"),
        (["ab"], ["abc"], "ab", None),
    ],
)
def test_stop_strings(pieces: list[str], stops: list[str], said: str, hit: str | None) -> None:
    matcher = StopMatcher(stops)
    shown = "".join([matcher.push(piece) for piece in pieces])
    assert (shown + matcher.flush(), matcher.hit) == (said, hit)


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=3))
def test_stop_strings_do_not_depend_on_the_pieces(text: str, stops: list[str]) -> None:
    whole, single = StopMatcher(stops), StopMatcher(stops)
    at_once = whole.push(text) + whole.flush()
    by_character = "".join([single.push(char) for char in text])
    assert (by_character + single.flush(), single.hit) == (at_once, whole.hit)
    cuts = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    assert at_once == (text[: min(cuts)[1]] if cuts else text)


def test_overlap() -> None:
    assert overlap("x<tool", "<tool_call>") == 5
    assert overlap("<tool_call>", "<tool_call>") == 0
    assert overlap("abc", "x") == 0
