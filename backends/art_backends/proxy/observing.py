"""What is told of calls to those who run the server: metrics in Prometheus' form, spans of OpenTelemetry.

Metrics are counts, durations and gauges, without a model's, a rollout's or an app's name: their number is bounded.
Spans are made where OpenTelemetry's API is installed and somebody has set up a tracer (``opentelemetry-instrument
art-backends serve`` does), go on a trace that the client began, and are handed on to the engine. Without a tracer the
client's own headers say which trace a call belongs to.

It refuses to tell what was asked or said.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

try:
    from opentelemetry import propagate, trace
except ModuleNotFoundError:
    _tracing = False
else:
    _tracing = True

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
_GAUGES = {
    "in_flight": "calls that hold a place",
    "waiting": "calls that wait for a place",
    "replicas_up": "engine servers that take calls, where there may be several",
}


class Observer:
    """For one proxy; ``snapshot`` gives its counters and gauges. ``text`` is what Prometheus scrapes."""

    def __init__(self, snapshot: Callable[[], dict[str, Any]]) -> None:
        self._registry = CollectorRegistry()
        self._calls = Counter(
            "art_calls", "calls that were answered or given up", ["dialect", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "art_call_seconds",
            "from a request to the end of its answer",
            ["dialect"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._first = Histogram(
            "art_first_byte_seconds",
            "from a request to the first byte of its answer",
            ["dialect"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._registry.register(_Counts(snapshot))
        self._kept: dict[tuple[str, str], tuple[Counter, Histogram, Histogram]] = {}  # looking one up takes a while

    def text(self) -> bytes:
        """All metrics."""
        return generate_latest(self._registry)

    def call(self, dialect: str, model: str, headers: Iterable[tuple[str, str]]) -> Observed:
        """Observe a call: ``with observer.call(…) as observed``."""
        return Observed(self, dialect, model, headers)

    def over(self, dialect: str, status: str, seconds: float, first: float | None) -> None:
        """A call is over."""
        kept = self._kept.get((dialect, status))
        if kept is None:
            kept = self._calls.labels(dialect, status), self._seconds.labels(dialect), self._first.labels(dialect)
            self._kept[dialect, status] = kept
        kept[0].inc()
        kept[1].observe(seconds)
        if first is not None:
            kept[2].observe(first)


class Observed:
    """One call. Used as a context for as long as it runs."""

    def __init__(self, observer: Observer, dialect: str, model: str, headers: Iterable[tuple[str, str]]) -> None:
        self._observer = observer
        self._dialect = dialect
        self._model = model
        self._headers = headers
        self._stack = ExitStack()
        self._span: Any = None
        self._began = time.monotonic()
        self._first: float | None = None
        self._status: int | None = None

    def __enter__(self) -> Self:
        if _tracing and not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            tracer = trace.get_tracer("art_backends")
            attributes = {"gen_ai.operation.name": self._dialect, "gen_ai.request.model": self._model}
            self._span = self._stack.enter_context(
                tracer.start_as_current_span(
                    f"{self._dialect} {self._model}",
                    context=propagate.extract(dict(self._headers)),
                    kind=trace.SpanKind.SERVER,
                    attributes=attributes,
                )
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        status = "gone" if self._status is None else str(self._status)
        self._observer.over(self._dialect, status, time.monotonic() - self._began, self._first)
        if self._span is not None:
            self._span.set_attribute("http.response.status_code", self._status or 499)
            if self._status is None or self._status >= 500:
                self._span.set_status(trace.StatusCode.ERROR)
        self._stack.close()

    def belongs(self, rollout: str | None, version: str | None) -> None:
        """Whose the call is, and which version answers it."""
        if self._span is not None:
            known = {"art.rollout_id": rollout, "art.version": version}
            self._span.set_attributes({name: value for name, value in known.items() if value is not None})

    def answered(self, status: int) -> None:
        """The status line was sent."""
        self._status = status

    def told(self) -> None:
        """A part of the answer was sent."""
        if self._first is None:
            self._first = time.monotonic() - self._began

    def onward(self) -> list[tuple[str, str]]:
        """Headers that hand the trace on."""
        if self._span is None:
            return []
        carrier: dict[str, str] = {}
        propagate.inject(carrier, context=trace.set_span_in_context(self._span))
        return list(carrier.items())


class _Counts(Collector):
    def __init__(self, snapshot: Callable[[], dict[str, Any]]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        for name, value in self._snapshot().items():
            if name in _GAUGES:
                yield GaugeMetricFamily(f"art_{name}", _GAUGES[name], value=value)
            elif isinstance(value, int):
                yield CounterMetricFamily(f"art_proxy_{name}", f"see proxy.{name} of the status", value=value)
