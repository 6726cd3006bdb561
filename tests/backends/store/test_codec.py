"""Values come back as they were; what was cut is noticed."""

import pytest
from art_backends.errors import StoreError
from art_backends.store import codec
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_ids(ids: list[int]) -> None:
    assert codec.unpack_ids(codec.pack_ids(ids)) == ids


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_floats(values: list[float]) -> None:
    assert codec.unpack_floats(codec.pack_floats(values)) == values


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(json_values)
def test_json(value: object) -> None:
    assert codec.unpack_json(codec.pack_json(value)) == value


def test_little_endian_on_every_machine() -> None:
    assert codec.pack_ids([1, -2]) == b"\x01\x00\x00\x00\xfe\xff\xff\xff"
    assert codec.pack_floats([1.0]) == b"\x00\x00\x80\x3f"


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(OverflowError):
        codec.pack_ids([2**31])
    with pytest.raises(TypeError):
        codec.pack_json({"a": object()})


def test_damage_is_noticed() -> None:
    with pytest.raises(StoreError, match="cut row"):
        codec.unpack_ids(b"\x01\x00\x00")
    with pytest.raises(StoreError, match="damaged row"):
        codec.unpack_json(codec.pack_json({"a": 1})[:-3])
