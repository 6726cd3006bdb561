"""Scopes in threads, executors and pools: each function works for whoever gave it, workers for nobody."""

import asyncio
import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import Pool, ThreadPool

import pytest
from art_backends import capture
from art_backends.capture import current_scope, open_scope, outside_requests, rollout_scope

pytestmark = pytest.mark.usefixtures("captured")


def name():
    scope = current_scope()
    return scope and scope.rollout_id


def scope(rollout_id):
    return rollout_scope("http://proxy", "token-" + rollout_id, rollout_id)


def in_thread(function, make=threading.Thread):
    found = []
    thread = make(target=lambda: found.append(function()))
    thread.start()
    thread.join(20)
    return found[0]


def test_scopes_nest_and_end():
    assert name() is None
    with scope("a") as outer:
        with scope("b") as inner:
            assert name() == "b"
        assert name() == "a"
        assert inner.ended
        assert not outer.ended
    assert outer.ended
    assert name() is None
    assert "token" not in repr(outer)


def test_a_thread_carries_the_scope_of_who_started_it():
    with scope("a"):
        assert in_thread(name) == "a"
        assert in_thread(lambda: in_thread(name)) == "a"
    assert in_thread(name) is None


def test_timers_and_thread_subclasses_with_run():
    found = []

    class Mine(threading.Thread):
        def run(self):
            found.append(name())

    with scope("a"):
        thread = Mine()
        thread.start()
        timer = threading.Timer(0, lambda: found.append(name()))
        timer.start()
        thread.join(20)
        timer.join(20)
    assert found == ["a", "a"]
    assert "run" not in vars(thread)


def test_starting_a_thread_twice_is_the_same_error_as_ever():
    with scope("a"):
        thread = threading.Thread(target=name)
        thread.start()
        thread.join(20)
        with pytest.raises(RuntimeError, match="once"):
            thread.start()


def test_the_end_of_a_scope_is_seen_in_its_threads():
    go = threading.Event()
    found = []

    def straggler():
        go.wait(20)
        found.append(current_scope().ended)

    with scope("a"):
        thread = threading.Thread(target=straggler)
        thread.start()
    go.set()
    thread.join(20)
    assert found == [True]


def test_a_pools_worker_works_for_whoever_submits():
    with ThreadPoolExecutor(1) as pool:
        with scope("a"):
            assert pool.submit(name).result(20) == "a"  # the worker was started here
        assert pool.submit(name).result(20) is None
        with scope("b"):
            assert pool.submit(name).result(20) == "b"
            assert list(pool.map(lambda _: name(), range(3))) == ["b"] * 3


def test_a_pool_made_before_capture():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(name).result(20)
        with scope("a"):
            assert pool.submit(name).result(20) == "a"


def test_thread_pools_of_multiprocessing():
    with scope("a"):
        pool = ThreadPool(2)
    with pool:
        assert pool.apply(name) is None
        with scope("b"):
            assert pool.apply(name) == "b"
            assert pool.map(lambda _: name(), range(5)) == ["b"] * 5
            assert list(pool.imap(lambda _: name(), range(5))) == ["b"] * 5
            assert list(pool.imap_unordered(lambda _: name(), range(5))) == ["b"] * 5
            assert pool.starmap_async(lambda a, b: name(), [(1, 2)]).get(20) == ["b"]
        pool.close()
        pool.join()


async def test_every_way_out_of_a_task():
    loop = asyncio.get_running_loop()
    with scope("a"):
        assert await loop.run_in_executor(None, name) == "a"
        assert await asyncio.to_thread(name) == "a"
        with ThreadPoolExecutor(1) as pool:
            assert await loop.run_in_executor(pool, name) == "a"
        assert await asyncio.create_task(asyncio.to_thread(name)) == "a"


async def test_fifty_at_once_do_not_mix():
    async def one(number):
        with scope(str(number)):
            return await asyncio.gather(*(asyncio.to_thread(in_thread, name) for _ in range(3)))

    found = await asyncio.gather(*(one(number) for number in range(50)))
    assert found == [[str(number)] * 3 for number in range(50)]


def test_values_and_exceptions_pass_through():
    def fails(a, *, b):
        raise KeyError(a + b)

    with ThreadPoolExecutor(1) as pool, scope("a"), pytest.raises(KeyError, match="3"):
        pool.submit(fails, 1, b=2).result(20)


def test_a_scope_left_in_another_context():
    def steps():
        with scope("a"):
            yield
        yield

    generator = steps()
    first, second = contextvars.copy_context(), contextvars.copy_context()
    first.run(next, generator)
    second.run(next, generator)
    assert second.run(name) is None


def test_finding_scopes_by_rollout():
    kept = open_scope("http://proxy", "t", "batch-1")
    assert capture.find_scope("batch-1") is kept
    assert name() is None
    kept.end()
    assert capture.find_scope("batch-1").ended
    del kept
    assert capture.find_scope("batch-1") is None


def test_requests_that_lost_their_scope_are_seen(proxy):
    from openai import OpenAI

    with OpenAI(base_url=proxy.url + "/v1", api_key="k") as client:
        before = outside_requests()
        client.models.list()
        assert outside_requests() == before  # nobody's rollout is open
        with scope("a"):
            contextvars.Context().run(client.models.list)
        assert outside_requests() == before + 1


def test_uninstalling_restores_the_original_objects(captured):
    # The fixture has installed it: one more pair changes nothing, the last uninstall restores (checked in a thread's
    # own words: the function is the standard library's).
    places = [(threading.Thread, "start"), (ThreadPoolExecutor, "submit"), (ThreadPool, "__init__")]
    places += [(Pool, method) for method in ("apply_async", "_map_async", "imap", "imap_unordered")]
    ours = [vars(kind)[method] for kind, method in places]
    capture.uninstall()
    originals = [vars(kind)[method] for kind, method in places]
    capture.install()
    assert all(
        old.__module__ in ("threading", "concurrent.futures.thread", "multiprocessing.pool") for old in originals
    )
    assert all(mine.__wrapped__ is old for mine, old in zip(ours, originals, strict=True))


def test_a_later_patch_of_somebody_else_survives():
    ours = threading.Thread.start

    def theirs(self):
        ours(self)

    capture.uninstall()
    original = threading.Thread.start
    capture.install()
    try:
        threading.Thread.start = theirs
        capture.uninstall()
        assert threading.Thread.start is theirs
        assert in_thread(name) is None
    finally:
        threading.Thread.start = original
        capture.install()
