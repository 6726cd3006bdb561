"""Freed memory goes back to the system.

A training step allocates gigabytes and frees them; glibc keeps what was freed on its heaps, in pieces that the next
step, of another size, does not fit. ``give_back`` is for the pauses between steps. It refuses to guess: where the C
library has no ``malloc_trim`` (macOS, musl) nothing is done.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any


def give_back() -> bool:
    """Return free pages of the C heap to the system; whether the library could and did."""
    trim = _malloc_trim()
    return trim is not None and bool(trim(0))


@cache
def _malloc_trim() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = [ctypes.c_size_t], ctypes.c_int
    return function
