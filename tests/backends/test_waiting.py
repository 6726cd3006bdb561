import asyncio
import contextvars
import os
import signal
import threading

import pytest
from art_backends.waiting import OverdueError, SelfCancelledError, bounded, in_thread, resolve, run_to_end, watched


async def test_bounded_gives_the_result_or_the_error():
    async def work():
        return 5

    async def fail():
        raise TimeoutError("its own")

    assert await bounded(work(), 5) == 5
    with pytest.raises(TimeoutError, match="its own") as caught:
        await bounded(fail(), 5)
    assert not isinstance(caught.value, OverdueError)


async def test_bounded_gives_up_on_what_ignores_its_cancellation():
    release, cancelled = asyncio.Event(), asyncio.Event()

    async def stubborn():
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                cancelled.set()

    with pytest.raises(OverdueError, match="not done within"):
        await bounded(stubborn(), 0.01, grace=0.01)
    assert cancelled.is_set()
    release.set()


async def test_bounded_tells_a_task_that_cancelled_itself_from_a_caller_that_was_cancelled():
    async def itself():
        raise asyncio.CancelledError

    with pytest.raises(SelfCancelledError):
        await bounded(itself(), 5)

    started, ended = asyncio.Event(), []

    async def long():
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    task = asyncio.ensure_future(bounded(long(), 60))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]


async def test_in_thread_carries_context_and_errors():
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(7)
    assert await in_thread(lambda x: (variable.get(), x, threading.current_thread().daemon), 2) == (7, 2, True)
    for error, kind in ((KeyError("x"), KeyError), (SystemExit(1), RuntimeError), (StopIteration(), RuntimeError)):

        def fail(error=error):
            raise error

        with pytest.raises(kind):
            await in_thread(fail)


async def test_in_thread_may_be_given_up():
    release, ended = threading.Event(), threading.Event()

    def hang():
        release.wait(30)
        ended.set()

    with pytest.raises(OverdueError):
        await bounded(in_thread(hang), 0.01)
    release.set()
    assert await in_thread(ended.wait, 30)
    await asyncio.sleep(0)  # its late result is dropped without a word


async def test_resolve():
    async def five():
        return 5

    assert await resolve(five()) == 5
    assert await resolve(5) == 5


def test_run_to_end_gives_the_result_and_the_width():
    async def main():
        barrier = threading.Barrier(12)
        await asyncio.gather(*(asyncio.to_thread(barrier.wait, 30) for _ in range(12)))
        return "done"

    assert run_to_end(main(), threads=12) == "done"


@pytest.mark.parametrize("where", ["a task", "a thread", "a cancelled task"])
def test_sys_exit_in_a_task_does_not_end_the_loop(where):
    async def leaves():
        if where == "a cancelled task":
            try:
                await asyncio.Event().wait()
            finally:
                raise SystemExit(3)
        await asyncio.to_thread(leaves_thread) if where == "a thread" else leaves_thread()

    def leaves_thread():
        raise SystemExit(3)

    async def main():
        task = asyncio.create_task(leaves(), name="one")
        await asyncio.sleep(0)
        if where == "a cancelled task":
            task.cancel()
        (error,) = await asyncio.gather(task, return_exceptions=True)
        assert task.get_coro().__name__ == "leaves"
        unstarted = asyncio.create_task(leaves())
        unstarted.cancel()
        await asyncio.gather(unstarted, return_exceptions=True)
        assert unstarted.cancelled()
        return error

    error = run_to_end(main())
    assert (type(error), str(error)) == (RuntimeError, "SystemExit: 3")


def test_run_to_end_does_not_wait_for_a_thread_that_hangs():
    release = threading.Event()

    async def main():
        hung = asyncio.get_running_loop().run_in_executor(None, release.wait, 60)
        await asyncio.wait({hung}, timeout=0.01)
        return "done"

    assert run_to_end(main(), threads=1) == "done"
    release.set()


def test_ctrl_c_cancels_and_lets_it_clean_up():
    cleaned = []

    async def main():
        try:
            asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            cleaned.append(True)
            raise

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_to_end(main(), threads=1, stopping=lambda: cleaned.append("said"))
    assert cleaned == ["said", True]  # before it is done
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_again_stops_even_code_that_blocks_the_event_loop():
    async def main():
        os.kill(os.getpid(), signal.SIGINT)  # asks for a clean stop, which blocked code cannot make
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(30)

    with pytest.raises(KeyboardInterrupt):
        run_to_end(main(), threads=1)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


async def test_a_blocked_event_loop_is_told_with_the_place():
    told, warned = threading.Event(), []

    def warn(text):
        warned.append(text)
        told.set()

    def a_blocking_call():
        assert told.wait(30)

    with watched(warn, 0.05):
        a_blocking_call()
    assert len(warned) == 1
    assert "in a_blocking_call" in warned[0]


async def test_an_event_loop_that_turns_is_not_told():
    warned = []
    with watched(warned.append, 30):
        await asyncio.sleep(0)
    assert warned == []


def test_a_cancellation_of_its_own_is_no_ctrl_c():
    async def main():
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run_to_end(main(), threads=1)


def test_errors_come_through_on_another_thread_too():
    async def main():
        raise ValueError("trouble")

    caught = []

    def work():
        try:
            run_to_end(main(), threads=1)
        except ValueError as error:
            caught.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert caught == ["trouble"]
