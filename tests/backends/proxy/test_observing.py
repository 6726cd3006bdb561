"""Metrics and spans of calls: counted once, timed, without a word of what was asked or said."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from art_backends.proxy import observing
from art_backends.trajectories import CallStatus
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from tests.backends.proxy.fake_engine import USER, WAIT, World, answer, say, slam, sse, status

TRACE = "0af7651916cd43dd8448eb211c80319c"
CHAT: Any = {"model": "m", "messages": USER}


def samples(w: World) -> dict[tuple[str, ...], float]:
    """Values by name and labels."""
    found = {}
    for family in text_string_to_metric_families(w.proxy.metrics().decode()):
        for sample in family.samples:
            found[sample.name, *sample.labels.values()] = sample.value
    return found


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(observing.trace, "get_tracer", provider.get_tracer)
    monkeypatch.setattr(observing.trace, "get_tracer_provider", lambda: provider)
    yield exporter
    provider.shutdown()


async def test_calls_are_counted_and_timed_by_dialect_and_status(w: World) -> None:
    w.engine.script += [answer("secret words"), status(429, {"error": {"message": "no"}}), slam]
    http = w.http
    for body in (CHAT, CHAT, {**CHAT, "model": "a secret model"}):
        await http.post("/v1/chat/completions", json=body)
    await http.post("/v1/messages", json={**CHAT, "max_tokens": 5})
    await http.post("/v1/responses", json={"model": "m", "input": "x", "stream": True})
    await http.get("/v1/models")  # answered on the same connection when the call before it is over
    found = samples(w)
    assert found["art_calls_total", "chat", "200"] == 1
    assert found["art_calls_total", "chat", "429"] == 1
    assert found["art_calls_total", "chat", "502"] == 1
    assert found["art_calls_total", "messages", "200"] == 1
    assert found["art_calls_total", "responses", "200"] == 1
    assert found["art_call_seconds_count", "chat"] == found["art_first_byte_seconds_count", "chat"] == 3
    assert (found["art_in_flight",], found["art_waiting",]) == (0, 0)
    assert (found["art_proxy_calls_total",], found["art_proxy_errors_total",]) == (5, 2)
    assert "secret" not in w.proxy.metrics().decode()


async def test_a_call_given_up_by_its_client_is_counted_as_gone(w: World) -> None:
    w.engine.script.append(sse([b"{}"], hold_after=0))
    _, writer = await w.raw(CHAT)
    await asyncio.wait_for(w.engine.reached.wait(), WAIT)
    writer.transport.abort()
    await asyncio.wait_for(w.engine.aborted.wait(), WAIT)
    async with asyncio.timeout(WAIT):
        while ("art_call_seconds_count", "chat") not in (found := samples(w)):
            assert w.store.only.status is not CallStatus.OK
            await asyncio.sleep(0)
    assert sum(value for name, value in found.items() if name[:2] == ("art_calls_total", "chat")) == 1


async def test_a_span_goes_on_the_client_s_trace_and_is_handed_to_the_engine(
    w: World, spans: InMemorySpanExporter
) -> None:
    parent = f"00-{TRACE}-b7ad6b7169203331-01"
    sdk = w.sdk()
    await say(sdk, extra_headers={"traceparent": parent})
    await sdk.models.list()
    (span,) = spans.get_finished_spans()
    assert span.name == "chat gpt-4o-mini"
    assert format(span.context.trace_id, "032x") == TRACE
    assert span.parent is not None
    assert format(span.parent.span_id, "016x") == "b7ad6b7169203331"
    assert span.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "gpt-4o-mini",
        "art.rollout_id": "r1",
        "art.version": "policy@3",
        "http.response.status_code": 200,
    }
    handed = w.engine.chats[0].headers["traceparent"]
    assert handed == f"00-{TRACE}-{span.context.span_id:016x}-01"


async def test_an_error_is_an_error_of_the_span(w: World, spans: InMemorySpanExporter) -> None:
    w.engine.script.append(slam)
    http = w.http
    await http.post("/v1/chat/completions", json=CHAT)
    await http.get("/v1/models")
    (span,) = spans.get_finished_spans()
    assert span.status.status_code is trace.StatusCode.ERROR
