import json
import math
import resource
import signal
import subprocess
import sys

import pytest
from art_backends.errors import StoreError
from art_backends.tracking import MetricsFile, read_metrics


def test_rows_come_back(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    file = MetricsFile(path)
    assert file.rows == []
    file.write({"step": 1, "loss": 0.5})
    file.write({"step": 2, "loss": math.nan, "name": "ü"})
    file.close()
    assert read_metrics(path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": None, "name": "ü"}]


def test_no_file_no_rows(tmp_path):
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_a_line_torn_at_any_byte_is_cut_off_and_what_stands_before_it_kept(tmp_path):
    first, last = b'{"step": 1, "reward": 0.25}\n', b'{"step": 2, "reward": "\xc3\xbc"}\n'
    path = tmp_path / "metrics.jsonl"
    for length in range(len(last)):
        path.write_bytes(first + last[:length])
        assert [row["step"] for row in read_metrics(path)] == [1]
        file = MetricsFile(path)
        assert [row["step"] for row in file.rows] == [1]
        file.write({"step": 3})
        file.close()
        assert [json.loads(line)["step"] for line in path.read_bytes().splitlines()] == [1, 3]


@pytest.mark.parametrize("rubbish", [b"\x00\x00\x00\n", b"[1]\n", b"\xff\xfe\n"])
def test_what_is_no_row_ends_the_file(tmp_path, rubbish):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + rubbish)
    file = MetricsFile(path)
    file.close()
    assert [row["step"] for row in file.rows] == [1]
    assert path.read_bytes() == b'{"step": 1}\n'


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        MetricsFile(tmp_path / "file" / "metrics.jsonl")


def test_a_full_disk_is_said_and_the_rows_before_it_stay(tmp_path):
    code = """
import sys
from pathlib import Path
from art_backends.errors import StoreError
from art_backends.tracking import MetricsFile
file = MetricsFile(Path(sys.argv[1]))
try:
    for step in range(1000):
        file.write({"step": step})
except StoreError as error:
    sys.exit(f"said: {error}")
"""
    path = tmp_path / "metrics.jsonl"

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))

    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=limit,
    )
    assert "said:" in done.stderr
    assert "File too large" in done.stderr
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert len(rows) > 30
