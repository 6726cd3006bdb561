"""The embedded engine without HTTP: rows go in, tokens come out, many rows and adapter versions at once.

One thread owns the models and everything computed; the event loops only wait on queues. Between two decode steps new
rows join and finished or cancelled ones leave. Rows of one adapter version form one batch; versions take turns.

It refuses to know about text, tools and HTTP. A row whose mask fails or whose output is not finite fails alone; an
error of the model itself ends the engine: every waiting row gets it, and ``healthy`` is False from then on.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Self, cast

import torch
from transformers import PreTrainedModel

from art_backends.engines.embedded.drafts import MOST
from art_backends.engines.embedded.executors import choose
from art_backends.engines.embedded.kv import Limits
from art_backends.engines.embedded.requests import Generation, Token
from art_backends.engines.embedded.rows import Row, deliver
from art_backends.engines.embedded.sampling import Sample, sample
from art_backends.engines.embedded.weights import Version, Weights
from art_backends.errors import AdapterError, EngineError

STUCK_SECONDS = 900.0  # that one pass of the model may take until the engine counts as hung

_log = logging.getLogger(__name__)


class Engine:
    """Samples from a causal language model and its adapter versions.

    ``model`` is read and never written, nor are its modules or its configuration changed. ``max_model_len`` is cut to
    what the model has positions for; ``keep_versions`` merged versions stay in memory besides those in use; ``seed``
    seeds rows that come without one; ``pack`` keeps the linear weights in a faster layout too (CPU only); ``guesses``
    is the most tokens that are guessed at once for a row (0: none; see ``drafts``).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_model_len: int = 4096,
        limits: Limits | None = None,
        keep_versions: int = 2,
        pack: bool = True,
        seed: int = 0,
        guesses: int = MOST,
    ) -> None:
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.max_model_len = min(max_model_len, positions) if positions else max_model_len
        self.limits = limits or Limits()
        self.failure: str | None = None
        self._weights = Weights(model, keep=keep_versions, pack=pack)
        self._executor = choose(self._weights.base, self.limits, self.max_model_len, guesses)
        self._base = Version(None, None)
        self._versions: dict[str, Version] = {}
        self._vocab = int(cast(torch.Tensor, model.get_input_embeddings().weight).shape[0])
        self._seeds = random.Random(seed)  # noqa: S311
        self._wake = threading.Condition()  # guards what follows, down to _stopping
        self._inbox: deque[Row] = deque()
        self._retired: list[Version] = []
        self._poked = False
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._waiting: deque[Row] = deque()  # from here on the engine's thread's own
        self._active: list[Row] = []
        self._sampled = self._prompted = 0
        self._busy = 0.0
        self._pass_began: float | None = None  # time.perf_counter()

    # ------------------------------------------------------------------ any thread

    @property
    def healthy(self) -> bool:
        """Whether rows are being answered; not if one pass of the model has taken STUCK_SECONDS."""
        began = self._pass_began
        stuck = began is not None and time.perf_counter() - began > STUCK_SECONDS
        return self.failure is None and not self._stopping and not stuck

    def start(self) -> None:
        """Start the engine's thread; rows submitted before wait."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="embedded-engine", daemon=True)
            self._thread.start()

    async def close(self) -> None:
        """Stop; rows that are not finished get an EngineError with status 503."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        else:
            self._fail_all(EngineError("the engine is closed", 503, "engine_closed"))

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def submit(self, generation: Generation) -> AsyncIterator[Token]:
        """Sample one row. Closing the iterator cancels it and frees its place.

        Raises EngineError at once: 404 model_not_found, 400 for a request that cannot be served, 503 when the queue
        is full or the engine has ended. The iterator raises EngineError if the row fails later.
        """
        self._find(generation.adapter)
        self._check(generation)
        return self._rows(generation)

    async def _rows(self, generation: Generation) -> AsyncIterator[Token]:
        with self._wake:
            version = self._find(generation.adapter)
            self._check(generation)
            seed = generation.seed if generation.seed is not None else self._seeds.getrandbits(64)
            row = Row(generation, version, seed)
            version.rows += 1
            self._inbox.append(row)
            self._wake.notify()
        try:
            while True:
                item = await row.queue.get()
                if isinstance(item, EngineError):
                    raise item
                yield item
                if item.finish is not None:
                    return
        finally:
            if not row.done:
                with self._wake:
                    row.cancelled = self._poked = True
                    self._wake.notify()

    def load_adapter(self, name: str, path: Path) -> None:
        """Make the adapter in folder ``path`` (PEFT format; it must not change afterwards) available as ``name``.

        Raises AdapterError if it cannot be served, EngineError 400 if the name is taken.
        """
        self._weights.check(path)
        with self._wake:
            if name in self._versions:
                raise EngineError(f"adapter {name!r} is already loaded", 400, "adapter_exists")
            self._versions[name] = Version(name, path)

    def unload_adapter(self, name: str) -> None:
        """No new rows for ``name``; rows that run finish on it. Raises EngineError 404."""
        with self._wake:
            version = self._find(name)
            del self._versions[name]
            self._retired.append(version)
            self._poked = True
            self._wake.notify()

    def adapters(self) -> list[str]:
        """Names of the loaded adapters, in the order they were loaded."""
        with self._wake:
            return list(self._versions)

    def metrics(self) -> dict[str, float]:
        """Counters since the start, and what is running and waiting now."""
        return {
            "tokens_sampled": self._sampled,
            "prompt_tokens": self._prompted,
            "prefill_tokens_computed": self._executor.computed,
            "busy_seconds": self._busy,
            "running": len(self._active),
            "waiting": len(self._waiting) + len(self._inbox),
            "adapter_merges": self._weights.merges,
            **self._executor.stats(),
        }

    def _find(self, adapter: str | None) -> Version:
        version = self._base if adapter is None else self._versions.get(adapter)
        if version is None:
            raise EngineError(f"The model `{adapter}` does not exist.", 404, "model_not_found")
        return version

    def _check(self, generation: Generation) -> None:
        if not self.healthy:
            raise EngineError(f"the engine has ended: {self.failure or 'closed'}", 503, "engine_closed")
        if len(self._waiting) + len(self._inbox) >= self.limits.max_waiting:
            raise EngineError("too many requests are waiting; try again later", 503, "engine_overloaded")
        ids = generation.prompt_ids
        if not ids or generation.max_tokens < 1:
            raise EngineError("the prompt is empty or max_tokens is less than 1", 400, "invalid_value")
        if not 0 <= min(ids) <= max(ids) < self._vocab:
            raise EngineError(f"the prompt holds token ids outside 0..{self._vocab - 1}", 400, "invalid_value")
        if not 0 <= generation.temperature < float("inf") or not 0 < generation.top_p <= 1 or generation.top_k < 0:
            raise EngineError("temperature, top_p or top_k is out of range", 400, "invalid_value")
        if len(ids) >= self.max_model_len:
            raise EngineError(
                f"This model's maximum context length is {self.max_model_len} tokens. However, your messages resulted "
                f"in {len(ids)} tokens. Please reduce the length of the messages.",
                400,
                "context_length_exceeded",
            )

    # ------------------------------------------------------------------ the engine's thread

    def _run(self) -> None:
        end = EngineError("the engine is closed", 503, "engine_closed")
        try:
            with torch.inference_mode():
                while self._gather():
                    begun = self._pass_began = time.perf_counter()
                    self._admit()
                    for version in list(dict.fromkeys(row.version for row in self._active)):
                        self._step(version)
                    self._pass_began = None
                    self._busy += time.perf_counter() - begun
        except Exception as error:  # boundary: the thread's last words go to the log and to every row  # noqa: BLE001
            _log.exception("the engine's thread ended")
            self.failure = f"{type(error).__name__}: {error}"
            end = EngineError(f"the engine failed: {self.failure}", 500, "engine_failed")
        finally:
            self._fail_all(end)

    def _gather(self) -> bool:
        """Wait for something to do and take it in; False when the engine is to stop."""
        with self._wake:
            while not (self._inbox or self._active or self._waiting or self._poked or self._stopping):
                self._wake.wait()
            if self._stopping:
                return False
            self._waiting.extend(self._inbox)
            self._inbox.clear()
            poked, self._poked = self._poked, False
        for row in [row for row in (*self._active, *(self._waiting if poked else ())) if row.cancelled]:
            self._leave(row)
        if poked:
            self._waiting = deque(row for row in self._waiting if not row.done)
        self._forget()
        return True

    def _forget(self) -> None:
        with self._wake:
            over = [version for version in self._retired if version.rows == 0]
            self._retired = [version for version in self._retired if version.rows > 0]
        for version in over:
            self._executor.forget(version)
            self._weights.drop(version)

    def _admit(self) -> None:
        while self._waiting and len(self._active) < self.limits.max_rows:
            if not self._executor.admit(self._waiting[0], alone=not self._active):
                break
            row = self._waiting.popleft()
            self._active.append(row)
            self._prompted += len(row.ids)
        self._executor.settle()

    def _step(self, version: Version) -> None:
        rows = [row for row in self._active if row.version is version]
        try:
            model = self._weights.model(version)
        except AdapterError as error:  # its folder is gone or has changed since it was loaded
            for row in rows:
                self._leave(row)
            deliver([(row, EngineError(str(error), 500, "adapter_error")) for row in rows])
            return
        for batch, logits in self._executor.step(version, model, rows):
            samples = sample(logits, [row.settings for row in batch])
            found: list[tuple[Row, Token | EngineError]] = []
            through: set[Row] = set()  # rows whose further logits here follow a token that was not sampled
            for row, one in zip(batch, samples, strict=True):
                if row in through:
                    continue
                item, on = self._take(row, one)
                found.append((row, item))
                if not on:
                    through.add(row)
            deliver(found)

    def _take(self, row: Row, one: Sample) -> tuple[Token | EngineError, bool]:
        """A sampled token enters its row; what the consumer gets, and whether its next logits are in the batch."""
        if one.error is not None:
            self._leave(row, keep=False)
            return EngineError(f"row of {row.version}: {one.error}", 500, "sampling_failed"), False
        generation = row.generation
        row.settings.draws.use()
        self._executor.learn(row, one.id)
        row.ids.append(one.id)
        row.sampled += 1
        self._sampled += 1
        finish, on = None, False
        if one.id in generation.stop_token_ids:
            finish = "stop"
        elif row.sampled >= generation.max_tokens or len(row.ids) >= self.max_model_len:
            finish = "length"
        if finish is not None:
            self._leave(row)
        else:
            on = self._executor.push(row, one.id)
            if generation.mask is not None:
                try:
                    generation.mask.accept(one.id)
                except Exception as error:  # boundary: a row's own mask may fail that row only  # noqa: BLE001
                    self._leave(row)
                    failed = f"the mask of constrained output failed: {error!r}"
                    return EngineError(failed, 500, "sampling_failed"), False
        return Token(one.id, one.logprob, one.top, finish), on

    def _leave(self, row: Row, *, keep: bool = True) -> None:
        row.done = True
        self._executor.release(row, keep=keep)
        if row in self._active:
            self._active.remove(row)
        with self._wake:
            row.version.rows -= 1

    def _fail_all(self, error: EngineError) -> None:
        with self._wake:
            self._stopping = True
            rows = [*self._active, *self._waiting, *self._inbox]
            self._inbox.clear()
        self._active = []
        self._waiting.clear()
        for row in rows:
            row.done = True
        deliver([(row, error) for row in rows])
