"""How values stand in the store: token ids as int32, logprobs as float32, JSON compressed.

All little-endian on every machine, so that a store can be moved. It refuses ids outside int32 and values that are
not JSON; a blob that was cut raises StoreError instead of giving fewer numbers.
"""

from __future__ import annotations

import json
import sys
import zlib
from array import array
from collections.abc import Sequence
from typing import Any

import orjson

from art_backends.errors import StoreError

_SWAP = sys.byteorder != "little"


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32; OverflowError for ids outside int32."""
    return _pack(array("i", ids))


def unpack_ids(blob: bytes) -> list[int]:
    return _unpack("i", blob).tolist()


def pack_floats(values: Sequence[float]) -> bytes:
    """Logprobs as little-endian float32 (relative error at most 6e-8)."""
    return _pack(array("f", values))


def unpack_floats(blob: bytes) -> list[float]:
    return _unpack("f", blob).tolist()


def _pack(values: array[Any]) -> bytes:
    if _SWAP:
        values.byteswap()
    return values.tobytes()


def _unpack(kind: str, blob: bytes) -> array[Any]:
    values: array[Any] = array(kind)
    if len(blob) % values.itemsize:
        raise StoreError(f"the store holds a cut row: {len(blob)} bytes are no whole number of {values.itemsize}")
    values.frombytes(blob)
    if _SWAP:
        values.byteswap()
    return values


def json_text(value: Any) -> bytes:
    """JSON; TypeError for values that are not."""
    try:
        return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
    except orjson.JSONEncodeError:  # lone surrogates and integers beyond 64 bits, which an agent's data may hold
        return json.dumps(value).encode()


def pack_json(value: Any) -> bytes:
    """Compressed JSON; TypeError for values that are not JSON."""
    return zlib.compress(json_text(value), 1)


def unpack_json(blob: bytes) -> Any:
    try:
        text = zlib.decompress(blob)
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError:
            return json.loads(text)
    except (zlib.error, ValueError) as error:
        raise StoreError(f"the store holds a damaged row: {error}") from None
