"""LangSmith, Langfuse and OpenTelemetry see a captured run as they see the same run without capture.

The real packages watch the same graph twice: its calls once answered by the provider, once captured and answered by the
proxy. What they recorded must be the same, the model's answer with it, and nothing of ours may be among it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from art_backends.capture import rollout_scope
from langchain_core.tools import tool
from langchain_core.tracers.langchain import LangChainTracer
from langchain_openai import ChatOpenAI
from langfuse import Langfuse
from langfuse.langchain import CallbackHandler
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langsmith import Client
from openinference.instrumentation.langchain import LangChainInstrumentor
from openinference.instrumentation.openai import OpenAIInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from art_langgraph.capturing import capturing

Run = Callable[..., Any]  # the graph, with LangChain callbacks


@tool
def stock(product: str) -> str:
    """Pieces in stock."""
    return f"7 of {product}"


def reply(body: dict[str, Any]) -> dict[str, Any] | None:
    """A model that calls the tool once, then says what the tool said."""
    if body.get("stream"):
        return None
    last = body["messages"][-1]
    if last["role"] == "tool":
        return {"role": "assistant", "content": f"There are {last['content']}."}
    function = {"name": "stock", "arguments": '{"product": "cups"}'}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call-1", "type": "function", "function": function}],
    }


@pytest.fixture(params=["invoke", "ainvoke"])
def both(request: pytest.FixtureRequest, proxy: Any, provider: Any) -> Any:
    """Runs ``watch(run)`` without capture and captured; returns what each time was recorded, and the final text."""
    proxy.reply = provider.reply = reply
    model = ChatOpenAI(model="m", base_url=provider.url + "/v1", api_key="k").bind_tools([stock])

    def agent(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    async def aagent(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    builder = StateGraph(MessagesState).add_node("agent", agent if request.param == "invoke" else aagent)
    builder.add_node("tools", ToolNode([stock])).add_edge(START, "agent").add_edge("tools", "agent")
    graph = builder.add_conditional_edges("agent", tools_condition).compile()
    ask = {"messages": [("user", "How many cups?")]}

    async def run(*callbacks: Any) -> str:
        config = {"callbacks": list(callbacks), "run_name": "my agent"}
        state = graph.invoke(ask, config) if request.param == "invoke" else await graph.ainvoke(ask, config)
        return str(state["messages"][-1].text)

    async def twice(watch: Callable[[Run], Any]) -> tuple[list[Any], list[Any]]:
        plain = await watch(run)
        assert (len(provider.seen), len(proxy.seen)) == (2, 0)
        with capturing(), rollout_scope(proxy.url, "token", "rollout"):
            captured = await watch(run)
        assert (len(provider.seen), len(proxy.seen)) == (2, 2)
        assert await run() == "There are 7 of cups."  # and afterwards it is as it was
        assert (len(provider.seen), len(proxy.seen)) == (4, 2)
        return plain, captured

    return twice


async def test_langsmith(both: Any) -> None:
    class Kept(Client):
        """The real client, but for the network: what it would send stays here."""

        def __init__(self) -> None:
            super().__init__(api_url="http://127.0.0.1:9", api_key="k", auto_batch_tracing=False)
            self.sent: list[dict[str, Any]] = []

        def request_with_retries(self, method: str, pathname: str, **options: Any) -> Any:
            body = json.loads(options["request_kwargs"]["data"])
            self.sent.append({"method": method, **body})

    async def watch(run: Run) -> list[Any]:
        client = Kept()
        tracer = LangChainTracer(client=client)
        assert await run(tracer) == "There are 7 of cups."
        tracer.wait_for_futures()
        names = {body["id"]: body["name"] for body in client.sent if body["method"] == "POST"}
        started = [(body["name"], body["run_type"]) for body in client.sent if body["method"] == "POST"]
        done = [(names[body["id"]], body.get("error")) for body in client.sent if body["method"] == "PATCH"]
        said = [json.dumps(body.get("outputs")) for body in client.sent if names[body["id"]] == "ChatOpenAI"]
        assert any("There are 7 of cups." in outputs for outputs in said)
        return [sorted(started), sorted(done)]

    plain, captured = await both(watch)
    assert plain == captured
    assert ("ChatOpenAI", "llm") in captured[0]
    assert ("stock", "tool") in captured[0]


async def test_langfuse(both: Any) -> None:
    async def watch(run: Run) -> list[Any]:
        exporter, key = InMemorySpanExporter(), f"pk-{uuid4()}"
        client = Langfuse(
            public_key=key,
            secret_key="sk",
            base_url="http://127.0.0.1:9",
            tracer_provider=TracerProvider(shutdown_on_exit=False),
            span_exporter=exporter,
        )
        handler = CallbackHandler(public_key=key)
        assert await run(handler) == "There are 7 of cups."
        assert handler.last_trace_id
        client.flush()
        return _told(exporter, "langfuse.observation.type", "langfuse.observation.output")

    plain, captured = await both(watch)
    assert plain == captured
    assert {"ChatOpenAI", "stock", "my agent"} <= {name for name, _, _ in captured}
    assert any("There are 7 of cups." in str(output) for _, _, output in captured)


async def test_opentelemetry(both: Any) -> None:
    """Instrumentation of LangChain and of the openai SDK, which wraps what capture wraps."""

    async def watch(run: Run) -> list[Any]:
        exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        instrumentors = (LangChainInstrumentor(), OpenAIInstrumentor())
        for instrumentor in instrumentors:
            instrumentor.instrument(tracer_provider=provider)
        try:
            assert await run() == "There are 7 of cups."
        finally:
            for instrumentor in instrumentors:
                instrumentor.uninstrument()
        return _told(exporter, "openinference.span.kind", "output.value")

    plain, captured = await both(watch)
    assert plain == captured
    assert [name for name, kind, _ in captured if kind == "LLM"] == ["ChatCompletion"] * 2 + ["ChatOpenAI"] * 2
    assert any("There are 7 of cups." in str(output) for _, _, output in captured)


def _told(exporter: InMemorySpanExporter, kind: str, output: str) -> list[Any]:
    """(name, kind, output) of each span, in an order of their own; ids that are new each time have no digits."""
    spans = [(span.name, span.attributes or {}) for span in exporter.get_finished_spans()]
    assert spans
    found = [
        (name, told.get(kind), re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}", "ID", str(told.get(output))))
        for name, told in spans
    ]
    return sorted(found, key=str)
