"""Freed heap memory really leaves the process, where the C library can do that."""

import ctypes
import platform
import sys
from pathlib import Path

import pytest
from art_backends.worker import memory

PIECE, PIECES = 64 << 10, 4096  # below the size that glibc maps by itself: 256 MiB of heap in all


def resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmRSS")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="no malloc_trim here")
def test_what_was_freed_leaves_the_process():
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    pieces = [library.malloc(PIECE) for _ in range(PIECES)]
    for piece in pieces:
        ctypes.memset(piece, 1, PIECE)
    full = resident()
    for piece in pieces[:-1]:  # the last one keeps the top of the heap where it is, so free alone gives nothing back
        library.free(piece)
    assert memory.give_back()
    assert full - resident() > PIECE * PIECES // 2
    library.free(pieces[-1])


def test_elsewhere_nothing_is_done(monkeypatch):
    memory._malloc_trim.cache_clear()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert memory.give_back() is False
    memory._malloc_trim.cache_clear()
