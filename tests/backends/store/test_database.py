"""Rows R3, R6, R8 and R9 of the reliability matrix: kills, full disks, failed fsyncs, torn logs."""

import contextlib
import json
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from art_backends.errors import StoreError
from art_backends.store import Store, database
from art_backends.trajectories import Call, CallStatus, Rollout

WRITER = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from art_backends.store import Store
    from art_backends.trajectories import Call, CallStatus, Choice, Rollout

    store = Store.open(Path(sys.argv[1]))
    turn = sys.argv[2]
    store.open_rollout(Rollout(id=turn, policy="p", version="p@0"))
    for number in range(100_000):
        call = Call(id=f"{turn}.{number}", rollout_id=turn, sequence=number, request={"n": number})
        store.begin_call(call)
        choices = [Choice(token_ids=list(range(50)), logprobs=[-0.5] * 50)] * 2
        store.finish_call(call.model_copy(update={"status": CallStatus.OK, "choices": choices}))
        sys.stdout.write(f"{number}\\n")
        sys.stdout.flush()
    """
)


def killed_writer(path: Path, turn: str, acked_before_kill: int) -> int:
    """Run a writer, kill -9 it once so many rows were acknowledged; returns how many were in all."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), turn], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        acked = 0
        for line in process.stdout:
            acked = int(line) + 1
            if acked == acked_before_kill:
                process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=30) == -signal.SIGKILL, process.stderr and process.stderr.read()
    return acked


def test_killed_writers_lose_nothing_that_was_acknowledged(tmp_path: Path, kills: int) -> None:
    path = tmp_path / "store.sqlite"
    lost = duplicates = halves = 0
    chance = random.Random(7)
    for turn in range(kills):
        acked = killed_writer(path, f"t{turn}", chance.randrange(1, 200))
        store = Store.open(path)  # checks the file's integrity
        calls = store.calls(f"t{turn}")
        store.close()
        whole = [call for call in calls if call.status is CallStatus.OK]
        lost += acked - len(whole) if acked > len(whole) else 0
        duplicates += len(calls) - len({call.sequence for call in calls})
        halves += sum(len(call.choices) != 2 or len(call.choices[1].token_ids) != 50 for call in whole)
        assert len(whole) <= acked + 1
    assert (lost, duplicates, halves) == (0, 0, 0)


def test_a_torn_log_gives_the_rows_before_the_tear(tmp_path: Path, make_rollout: Callable[..., Rollout]) -> None:
    path = tmp_path / "store.sqlite"
    store = Store.open(path)
    sizes = []  # of the log after each commit
    wal = Path(f"{path}-wal")
    for number in range(8):
        store.open_rollout(make_rollout(f"r{number}"))
        sizes.append(wal.stat().st_size)
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in (path, wal):
        shutil.copy(file, copy / file.name)
    store.close()
    whole = (copy / wal.name).read_bytes()
    database_bytes = (copy / path.name).read_bytes()
    chance = random.Random(3)
    cuts = {
        0,
        31,
        len(whole),
        *(size + change for size in sizes for change in (-1, 0, 1)),
        *chance.sample(range(len(whole)), 40),
    }
    for cut in sorted(cut for cut in cuts if cut <= len(whole)):
        shutil.rmtree(copy)
        copy.mkdir()
        (copy / path.name).write_bytes(database_bytes)
        (copy / wal.name).write_bytes(whole[:cut])
        torn = Store.open(copy / path.name)
        found = [rollout.id for rollout in torn.rollouts()]
        torn.close()
        assert found == [f"r{number}" for number in range(sum(size <= cut for size in sizes))], cut


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Files may not grow beyond ``size`` bytes: what a full disk looks like to a program."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_said_and_leaves_no_half_row(
    store: Store, make_rollout: Callable[..., Rollout], make_call: Callable[..., Call]
) -> None:
    store.open_rollout(make_rollout())
    request = {"text": "".join(random.Random(1).choices("abcdefghijklmnop", k=20_000))}
    kept = 0
    said = ""
    with largest_file(300_000):
        for number in range(200):
            try:
                store.finish_call(make_call(f"c{number}", sequence=number, request=request))
            except StoreError as error:
                said = str(error)
                break
            kept += 1
        else:
            pytest.fail("the disk was never full")
        assert "free space, then capture goes on by itself" in said
        with pytest.raises(StoreError):
            store.close_rollout("r1", reward=1.0, output=request)
        assert len(store.calls("r1")) == kept, "reading must go on"
    store.finish_call(make_call("after", sequence=999))
    calls = store.calls("r1")
    assert len(calls) == kept + 1
    assert all(len(call.choices) == 2 for call in calls)
    assert store.broken is None


def test_after_a_failed_fsync_nothing_more_is_written(tmp_path: Path, make_rollout: Callable[..., Rollout]) -> None:
    store = Store.open(tmp_path / "store.sqlite")
    store.open_rollout(make_rollout("before"))

    class Failing(sqlite3.OperationalError):
        sqlite_errorname = "SQLITE_IOERR_FSYNC"

    with pytest.raises(StoreError, match="nothing more is written"), store._database.write():
        raise Failing("disk I/O error")
    with pytest.raises(StoreError, match="nothing more is written"):
        store.open_rollout(make_rollout("after"))
    assert [rollout.id for rollout in store.rollouts()] == ["before"]
    assert "SQLITE_IOERR_FSYNC" in (store.broken or "")
    store.close()


def test_damage_is_found_at_opening(tmp_path: Path, make_rollout: Callable[..., Rollout]) -> None:
    path = tmp_path / "store.sqlite"
    store = Store.open(path)
    for number in range(200):
        store.open_rollout(make_rollout(f"r{number}", scenario="x" * 500))
    store.close()
    content = bytearray(path.read_bytes())
    for start in range(4096 * 4, len(content), 4096):
        content[start : start + 64] = b"\xff" * 64
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"damaged|malformed"):
        Store.open(path)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"cannot be opened.*check that the folder exists"):
        Store.open(tmp_path / "nowhere" / "store.sqlite")


def test_the_settings_that_the_promises_rest_on(store: Store) -> None:
    with store._database.write() as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
        assert connection.execute("PRAGMA synchronous").fetchone()[0] == 1  # NORMAL
    with store._database.read() as connection, pytest.raises(sqlite3.OperationalError, match="readonly"):
        connection.execute("DELETE FROM rollouts")


def test_a_reader_does_not_wait_for_a_writer(store: Store, make_rollout: Callable[..., Rollout]) -> None:
    store.open_rollout(make_rollout("r1"))
    with store._database.write() as connection:
        connection.execute("UPDATE rollouts SET policy = 'changed'")
        assert [rollout.policy for rollout in store.rollouts()] == ["policy"]
    assert [rollout.policy for rollout in store.rollouts()] == ["changed"]


def test_errors_are_of_the_one_tree() -> None:
    assert issubclass(database.ConflictError, StoreError)
    assert issubclass(database.NotFoundError, StoreError)
    assert json.dumps(str(StoreError("a"))) == '"a"'
