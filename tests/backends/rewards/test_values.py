import asyncio
import math
from decimal import Decimal
from fractions import Fraction

import numpy
import pytest
from art_backends.errors import RewardError
from art_backends.rewards.values import LazyCalls, Run, parts
from art_backends.trajectories import Call
from art_backends.waiting import in_thread
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("value", "number"),
    [(0.5, 0.5), (1, 1.0), (True, 1.0), (numpy.float32(0.5), 0.5), (numpy.int64(2), 2.0), (numpy.array(0.25), 0.25),
     (numpy.bool_(True), 1.0), (Decimal("0.5"), 0.5), (Fraction(1, 4), 0.25), (-3, -3.0)],
)  # fmt: skip
def test_numbers(value, number):
    assert parts(value) == (number, {})


def test_named_parts():
    assert parts({"reward": 1, "success": True, "style": 0.5}) == (1.0, {"success": 1.0, "style": 0.5})


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_finite_number_is_kept_as_it_is(value):
    assert parts(value)[0] == value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "None: a reward must be a finite number.*return statement"),
        (math.nan, "nan: a reward"),
        (math.inf, "inf: a reward"),
        (numpy.float32("nan"), "nan"),
        ("1.0", r"a str \('1.0'\)"),
        (b"1", "a bytes"),
        ([1.0], r"a list \(\[1.0\]\)"),
        ((1.0, 2.0), "a tuple"),
        (numpy.ones(1), r"a ndarray of shape \(1,\)"),
        (1j, "a complex"),
        (object(), "an object"),
        (10**400, "an int that is no number"),
        ({}, 'a mapping without "reward" \\(it has nothing\\)'),
        ({"score": 1}, "it has 'score'"),
        ({"reward": "1"}, "a str .* in part 'reward'"),
        ({"reward": 1, "x": math.nan}, "nan in part 'x'"),
        ({"reward": 1, 2: 3}, "the key 2"),
    ],
)
def test_what_is_no_reward_is_said(value, words):
    with pytest.raises(RewardError, match=words):
        parts(value)


def test_a_run_can_be_made_by_hand():
    run = Run({"q": 1}, output="answer")
    assert (list(run.calls), run.error) == ([], None)


async def test_calls_are_fetched_once_and_only_when_looked_at():
    fetched = []

    async def fetch():
        fetched.append(True)
        return [Call(id="a"), Call(id="b")]

    calls = LazyCalls(fetch, 5)
    assert not fetched
    assert await in_thread(lambda: [call.id for call in calls]) == ["a", "b"]
    assert await in_thread(lambda: (len(calls), calls[-1].id, len(calls[:1]))) == (2, "b", 1)
    assert fetched == [True]


async def test_calls_on_the_event_loop_must_be_loaded_first():
    async def fetch():
        await asyncio.sleep(0)
        return [Call(id="a")]

    calls = LazyCalls(fetch, 5)
    with pytest.raises(RewardError, match="not loaded"):
        len(calls)
    await calls.load()
    assert len(calls) == 1
