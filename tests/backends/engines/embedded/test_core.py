"""The engine against the plain model: same log-probabilities whatever is batched, shared, cancelled or mixed."""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from art_backends.engines.embedded.core import Engine
from art_backends.engines.embedded.executors import Cascade, Plain
from art_backends.engines.embedded.kv import Limits
from art_backends.engines.embedded.requests import Generation, Token
from art_backends.errors import AdapterError, EngineError
from peft import PeftModel
from transformers import PreTrainedModel

# peft asks transformers for a property under its former name
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

Models = Callable[..., PreTrainedModel]
Adapters = Callable[..., Path]

# So small that everything happens: segments of several pieces, splits, spills, waiting rows, evictions.
TIGHT = Limits(max_rows=6, slots=8, slot_tokens=24, min_shared=4, fold=6, piece=16, cache_tokens=300)


async def collect(
    engine: Engine, prompt: Iterable[int], adapter: str | None = None, count: int = 8, **how: Any
) -> list[Token]:
    return [token async for token in engine.submit(Generation(tuple(prompt), adapter, count, **how))]


def ids_of(tokens: list[Token]) -> list[int]:
    return [token.id for token in tokens]


@torch.no_grad()
def errors(model: Any, prompt: Iterable[int], tokens: list[Token]) -> list[float]:
    """|engine's logprob - plain forward pass on the whole sequence|, per sampled token."""
    prompt = list(prompt)
    whole = torch.tensor([prompt + ids_of(tokens)])
    logprobs = torch.log_softmax(model(input_ids=whole).logits[0].float(), -1)
    return [abs(logprobs[len(prompt) - 1 + at, token.id].item() - token.logprob) for at, token in enumerate(tokens)]


def assert_close(found: list[float]) -> None:
    assert found
    assert max(found) <= 1e-3
    assert sum(found) / len(found) <= 1e-4


def story(seed: int, length: int) -> list[int]:
    return torch.randint(0, 200, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
async def test_three_turns_of_many_rows_equal_the_plain_model(kind: str, new_model: Models) -> None:
    model = new_model(kind)
    base = story(1, 30)
    prompts = [base[: 10 + (i % 4) * 6] + [i % 3] * (i % 5 + 1) + base[: i % 7] for i in range(12)]
    found: list[float] = []
    async with Engine(model, max_model_len=200, limits=TIGHT) as engine:
        assert isinstance(engine._executor, Cascade)
        for turn in range(3):
            rows = await asyncio.gather(*(collect(engine, ids, count=6, seed=i) for i, ids in enumerate(prompts)))
            for ids, row in zip(prompts, rows, strict=True):
                found += errors(model, ids, row)
            prompts = [ids + ids_of(row) + [5, 6, 7 + turn] for ids, row in zip(prompts, rows, strict=True)]
        assert engine._executor.tree.tokens <= TIGHT.cache_tokens
        assert engine.metrics()["prefill_tokens_computed"] < engine.metrics()["prompt_tokens"]
    assert_close(found)


async def test_bfloat16_stays_near(new_model: Models) -> None:
    model = new_model().to(torch.bfloat16)
    async with Engine(model, limits=TIGHT) as engine:
        assert isinstance(engine._executor, Cascade)
        rows = await asyncio.gather(*(collect(engine, story(1, 20), seed=i) for i in range(4)))
    off = [value for row in rows for value in errors(model, story(1, 20), row)]
    assert sum(off) / len(off) < 0.2


async def test_adapter_mix_equals_peft(new_model: Models, new_adapter: Adapters, tmp_path: Path) -> None:
    model = new_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    folders = {f"policy@{n}": new_adapter(tmp_path / f"policy@{n}", seed=n) for n in (1, 2)}
    references: dict[str | None, Any] = {None: model}
    for name, folder in folders.items():
        references[name] = PeftModel.from_pretrained(new_model(), folder).eval()
    prompt = story(2, 25)
    async with Engine(model, limits=TIGHT, keep_versions=0) as engine:
        for name, folder in folders.items():
            engine.load_adapter(name, folder)
        assert engine.adapters() == ["policy@1", "policy@2"]
        names = [None, "policy@1", "policy@2"] * 4
        rows = await asyncio.gather(*(collect(engine, prompt, name, seed=i) for i, name in enumerate(names)))
        for name in ("policy@1", "policy@2", "policy@1"):
            rows.append(await collect(engine, prompt, name))
            names.append(name)
        assert engine.metrics()["adapter_merges"] > 2  # none is kept idle: merged again when used again
    off = [value for name, row in zip(names, rows, strict=True) for value in errors(references[name], prompt, row)]
    assert_close(off)
    assert max(errors(model, prompt, rows[1])) > 1e-2  # the adapter does change something
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


async def test_greedy_equals_generate(new_model: Models) -> None:
    model = new_model()
    prompt = story(3, 17)
    with torch.no_grad():
        expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)[0, 17:].tolist()
    async with Engine(model) as engine:
        row = await collect(engine, prompt, count=12, temperature=0)
    assert ids_of(row) == expected
    assert_close(errors(model, prompt, row))


async def test_a_seed_gives_the_same_tokens_whatever_else_runs(new_model: Models) -> None:
    async with Engine(new_model(), limits=TIGHT) as engine:
        alone = await collect(engine, story(4, 12), seed=7, count=15)
        others = [collect(engine, story(4, 6 + i), count=3 + i) for i in range(9)]
        crowded, *_ = await asyncio.gather(collect(engine, story(4, 12), seed=7, count=15), *others)
        other = await collect(engine, story(4, 12), seed=8, count=15)
    assert ids_of(alone) == ids_of(crowded) != ids_of(other)


async def test_unseeded_rows_differ_and_follow_the_engines_seed(new_model: Models) -> None:
    async def two() -> list[list[int]]:
        async with Engine(new_model(), seed=3) as engine:
            return [ids_of(await collect(engine, story(4, 12), count=15)) for _ in range(2)]

    first, second = await two(), await two()
    assert first == second
    assert first[0] != first[1]


async def test_a_shared_prompt_is_computed_once(new_model: Models) -> None:
    prompt = story(5, 40)
    engine = Engine(new_model())
    rows = [asyncio.ensure_future(collect(engine, prompt)) for _ in range(8)]
    await asyncio.sleep(0)  # the tasks run up to their first wait
    engine.start()
    await asyncio.gather(*rows)
    assert engine.metrics()["prefill_tokens_computed"] == 39 + 8
    await engine.close()


async def test_a_later_row_shares_the_prompt_of_a_running_one(new_model: Models) -> None:
    model, prompt = new_model(), story(5, 40)
    async with Engine(model) as engine:
        first = engine.submit(Generation(tuple(prompt), None, 400, seed=1))
        early = [await anext(first)]
        later = await asyncio.gather(*(collect(engine, prompt[:35] + [i] * 5, seed=i) for i in range(3)))
        early += [token async for token in first]
        assert engine.metrics()["prefill_tokens_computed"] <= 40 + 3 * 6
    assert_close(errors(model, prompt, early))
    for i, row in enumerate(later):
        assert_close(errors(model, prompt[:35] + [i] * 5, row))


async def test_the_next_turn_computes_only_what_is_new(new_model: Models) -> None:
    model = new_model()
    async with Engine(model) as engine:
        prompt = story(6, 30)
        rows = await asyncio.gather(*(collect(engine, prompt, count=20, seed=i) for i in range(6)))
        before = engine.metrics()["prefill_tokens_computed"]
        follow = [prompt + ids_of(row) + [1, 2, 3, 4, 5] for row in rows]
        again = await asyncio.gather(*(collect(engine, ids) for ids in follow))
        # the last sampled token was never computed, and 5 are new
        assert engine.metrics()["prefill_tokens_computed"] - before == 6 * (1 + 5)
        forks = await asyncio.gather(*(collect(engine, follow[0] + ids_of(again[0]) + [9], seed=i) for i in range(4)))
        assert engine.metrics()["prefill_tokens_computed"] - before < 6 * (1 + 5) + 4 * 3
    for ids, row in zip(follow, again, strict=True):
        assert_close(errors(model, ids, row))
    for row in forks:
        assert_close(errors(model, follow[0] + ids_of(again[0]) + [9], row))


async def test_finish_reasons(new_model: Models) -> None:
    async with Engine(new_model(), max_model_len=32) as engine:
        whole = await collect(engine, story(7, 10), count=6, temperature=0)
        assert [token.finish for token in whole] == [None] * 5 + ["length"]
        stop = ids_of(whole)[3]
        first = ids_of(whole).index(stop)
        row = await collect(engine, story(7, 10), count=6, temperature=0, stop_token_ids=frozenset({stop}))
        assert ids_of(row) == ids_of(whole)[: first + 1]
        assert row[-1].finish == "stop"
        full = await collect(engine, story(7, 25), count=100)
        assert len(full) == 7
        assert full[-1].finish == "length"


async def test_what_cannot_be_served_is_refused_at_once(
    new_model: Models, new_adapter: Adapters, tmp_path: Path
) -> None:
    engine = Engine(new_model(), max_model_len=32)
    bad: list[tuple[Generation, int, str]] = [
        (Generation((1,), "policy@9", 4), 404, "model_not_found"),
        (Generation(tuple(range(32)), None, 4), 400, "context_length_exceeded"),
        (Generation((), None, 4), 400, "invalid_value"),
        (Generation((1, 211), None, 4), 400, "invalid_value"),
        (Generation((-1,), None, 4), 400, "invalid_value"),
        (Generation((1,), None, 0), 400, "invalid_value"),
        (Generation((1,), None, 4, temperature=float("nan")), 400, "invalid_value"),
        (Generation((1,), None, 4, top_p=0.0), 400, "invalid_value"),
    ]
    for generation, status, code in bad:
        with pytest.raises(EngineError) as caught:
            engine.submit(generation)
        assert (caught.value.status, caught.value.code) == (status, code)
    folder = new_adapter(tmp_path / "policy@1")
    engine.load_adapter("policy@1", folder)
    with pytest.raises(EngineError, match="already loaded"):
        engine.load_adapter("policy@1", folder)
    with pytest.raises(EngineError, match="does not exist"):
        engine.unload_adapter("policy@2")
    (folder / "adapter_model.safetensors").write_bytes(b"cut")
    with pytest.raises(AdapterError, match="cannot be read"):
        engine.load_adapter("policy@3", folder)
    await engine.close()
    with pytest.raises(EngineError) as caught:
        engine.submit(Generation((1,), None, 4))
    assert caught.value.status == 503


async def test_unloading_lets_running_rows_finish(new_model: Models, new_adapter: Adapters, tmp_path: Path) -> None:
    async with Engine(new_model()) as engine:
        engine.load_adapter("policy@1", new_adapter(tmp_path / "a"))
        rows = engine.submit(Generation((1, 2, 3), "policy@1", 100, seed=5))
        first = await anext(rows)
        engine.unload_adapter("policy@1")
        with pytest.raises(EngineError):
            engine.submit(Generation((1, 2, 3), "policy@1", 4))
        engine.load_adapter("policy@1", new_adapter(tmp_path / "b", seed=9))  # the name, with other weights
        other = await collect(engine, (1, 2, 3), "policy@1", count=100, seed=5)
        rest = [token async for token in rows]
        assert len(rest) == 99
        assert [first, *rest] != other
        reference = PeftModel.from_pretrained(new_model(), tmp_path / "a").eval()
        assert_close(errors(reference, (1, 2, 3), [first, *rest]))
        assert_close(errors(PeftModel.from_pretrained(new_model(), tmp_path / "b").eval(), (1, 2, 3), other))


async def test_a_version_whose_folder_is_gone_fails_its_rows_only(
    new_model: Models, new_adapter: Adapters, tmp_path: Path
) -> None:
    async with Engine(new_model()) as engine:
        engine.load_adapter("policy@1", new_adapter(tmp_path / "a"))
        shutil.rmtree(tmp_path / "a")
        base, lost = await asyncio.gather(
            collect(engine, (1, 2)), collect(engine, (1, 2), "policy@1"), return_exceptions=True
        )
        assert isinstance(lost, EngineError)
        assert lost.code == "adapter_error"
        assert isinstance(base, list)
        assert engine.healthy


async def test_output_that_is_not_finite_fails_its_rows_only(
    new_model: Models, new_adapter: Adapters, tmp_path: Path
) -> None:
    model = new_model()
    async with Engine(model, limits=TIGHT) as engine:
        engine.load_adapter("broken@1", new_adapter(tmp_path / "a", scale=1e18))
        names = [None, "broken@1"] * 3
        rows = await asyncio.gather(*(collect(engine, story(8, 9), n) for n in names), return_exceptions=True)
        for name, row in zip(names, rows, strict=True):
            if name is None:
                assert isinstance(row, list)
                assert_close(errors(model, story(8, 9), row))
            else:
                assert isinstance(row, EngineError)
                assert row.code == "sampling_failed"
        after = await asyncio.gather(*(collect(engine, story(9 + i, 11)) for i in range(8)))
    for i, row in enumerate(after):
        assert_close(errors(model, story(9 + i, 11), row))


async def test_closing_the_iterator_frees_the_place(new_model: Models) -> None:
    model = new_model()
    async with Engine(model, limits=Limits(max_rows=1, slots=1, slot_tokens=96)) as engine:
        rows = engine.submit(Generation(tuple(story(1, 20)), None, 400))
        await anext(rows)
        waiting = asyncio.ensure_future(collect(engine, story(1, 22)))
        await rows.aclose()
        row = await asyncio.wait_for(waiting, 20)
        assert engine.metrics()["running"] == 0
    assert_close(errors(model, story(1, 22), row))


async def test_a_cancelled_waiting_row_leaves_the_queue(new_model: Models) -> None:
    engine = Engine(new_model())
    tasks = [asyncio.ensure_future(collect(engine, story(1, 20))) for _ in range(3)]
    await asyncio.sleep(0)  # the tasks run up to their first wait
    tasks[1].cancel()
    await asyncio.sleep(0)
    engine.start()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[1], asyncio.CancelledError)
    assert engine.metrics()["prompt_tokens"] == 40
    await engine.close()


async def test_the_queue_is_bounded(new_model: Models) -> None:
    engine = Engine(new_model(), limits=Limits(max_waiting=2))
    tasks = [asyncio.ensure_future(collect(engine, (1, 2))) for _ in range(2)]
    await asyncio.sleep(0)  # the tasks run up to their first wait
    with pytest.raises(EngineError) as caught:
        engine.submit(Generation((1, 2), None, 4))
    assert caught.value.status == 503
    await engine.close()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, EngineError)
        assert result.status == 503


async def test_when_the_loop_dies_every_row_is_told(
    new_model: Models, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(new_model())

    def fails(*_: Any) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(engine._executor, "step", fails)
    engine.start()
    results = await asyncio.gather(*(collect(engine, (1, 2)) for _ in range(3)), return_exceptions=True)
    for result in results:
        assert isinstance(result, EngineError)
        assert result.status in (500, 503)
        assert "out of luck" in str(result)
    assert not engine.healthy
    assert "out of luck" in (engine.failure or "")
    with pytest.raises(EngineError):
        engine.submit(Generation((1, 2), None, 4))
    await engine.close()


async def test_a_pass_that_never_ends_is_not_healthy(new_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("art_backends.engines.embedded.core.STUCK_SECONDS", 0.1)
    engine = Engine(new_model())
    inside, go_on, step = threading.Event(), threading.Event(), engine._executor.step

    def hangs(*arguments: Any) -> Any:
        inside.set()
        go_on.wait(60)
        return step(*arguments)

    monkeypatch.setattr(engine._executor, "step", hangs)
    engine.start()
    asked = asyncio.ensure_future(collect(engine, (1, 2)))
    assert await asyncio.to_thread(inside.wait, 60)
    async with asyncio.timeout(60):
        while engine.healthy:  # noqa: ASYNC110 - the engine is another thread, and time is what makes it unwell
            await asyncio.sleep(0.01)
    go_on.set()
    await asked
    assert engine.healthy
    await engine.close()


class Evens:
    """Allows even tokens; counts what it is told; may fail."""

    def __init__(self, fail_at: int = -1) -> None:
        self.told: list[int] = []
        self.fail_at = fail_at

    def allowed(self) -> torch.Tensor | None:
        if len(self.told) == self.fail_at:
            raise ValueError("no way on")
        return torch.arange(211) % 2 == 0

    def accept(self, token_id: int) -> None:
        self.told.append(token_id)


async def test_masks_constrain_their_row_and_fail_alone(new_model: Models) -> None:
    model, prompt = new_model(), story(1, 12)
    good, bad = Evens(), Evens(fail_at=2)
    async with Engine(model) as engine:
        one, two, free = await asyncio.gather(
            collect(engine, prompt, mask=good, top_logprobs=3),
            collect(engine, prompt, mask=bad),
            collect(engine, prompt),
            return_exceptions=True,
        )
    assert isinstance(one, list)
    assert isinstance(free, list)
    assert isinstance(two, EngineError)
    assert "no way on" in str(two)
    assert all(token.id % 2 == 0 and len(token.top) == 3 for token in one)
    assert good.told == ids_of(one)[:-1]
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1].clone()
    logits[1::2] = -torch.inf
    assert one[0].logprob == pytest.approx(torch.log_softmax(logits, -1)[one[0].id].item(), abs=1e-4)
    assert_close(errors(model, prompt, free))


@pytest.mark.parametrize(
    "overrides",
    [
        {"kind": "mistral", "sliding_window": 16},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    ],
)
async def test_models_that_cannot_share_are_computed_whole(
    overrides: dict[str, Any], new_model: Models, caplog: pytest.LogCaptureFixture
) -> None:
    model = new_model(**overrides)
    with caplog.at_level(logging.WARNING):
        engine = Engine(model)
    assert isinstance(engine._executor, Plain)
    assert "cannot share prefixes" in caplog.text
    engine.start()
    prompts = [story(1, 20), story(1, 24), story(2, 18)]
    rows = await asyncio.gather(*(collect(engine, ids, count=6) for ids in prompts))
    await engine.close()
    for ids, row in zip(prompts, rows, strict=True):
        assert_close(errors(model, ids, row))


async def test_a_window_longer_than_any_context_is_no_window(new_model: Models) -> None:
    engine = Engine(new_model("mistral", sliding_window=64), max_model_len=64)
    assert isinstance(engine._executor, Cascade)
    await engine.close()
