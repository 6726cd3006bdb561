"""Fifty rollouts at once share one graph and one model: every request carries its own rollout, node and run.

The prompt is the witness: it names the rollout and the node that asked, with LangGraph's own step and namespace, and is
compared with the token and the headers of the same request. A handler of the app's own notes which run of LangChain's
had which prompt. "api.openai.com" is a second server; it must see nothing of what happens in a scope.
"""

import asyncio
import operator
import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Annotated, TypedDict
from urllib.parse import unquote

import pytest
from art_backends.capture import open_scope, rollout_scope
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.config import get_config
from langgraph.graph import END, START, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Send
from openai import AsyncOpenAI, OpenAI

pytestmark = [pytest.mark.usefixtures("hooked"), pytest.mark.timeout(300)]  # over a thousand requests in one test

ROLLOUTS = 50
WITNESS = r"witness-(\d+) node-(\w+) step-(\d+) at-(\S+)"
KEY = "sk-user-secret"


class State(TypedDict):
    n: int
    out: Annotated[list, operator.add]


class Witness(BaseCallbackHandler):
    """Which prompt a run of LangChain's had, as the app's own handler is told."""

    def __init__(self):
        self.prompts = {}

    def on_chat_model_start(self, serialized, messages, *, run_id, **kwargs):
        self.prompts[str(run_id)] = messages[0][-1].content


class Apps:
    """The app: models and graphs built once, before any rollout, with an explicit base_url and key."""

    def __init__(self, url):
        base = {"base_url": url + "/v1", "api_key": KEY}
        self.base = base
        self.witness = Witness()
        self.model = ChatOpenAI(model="gpt-4o-mini", callbacks=[self.witness], **base)
        self.raw = OpenAI(**base)
        self.araw = AsyncOpenAI(**base)
        self.sync_graph = self._build(self._sync_nodes())
        self.async_graph = self._build({**self._sync_nodes(), **self._async_nodes()})
        self.sync_calls, self.async_calls = 15, 24

    def say(self, state, node):
        told = get_config()["metadata"]
        return f"witness-{state['n']} node-{node} step-{told['langgraph_step']} at-{told['langgraph_checkpoint_ns']}"

    def _sync_nodes(self):
        model, raw, say = self.model, self.raw, self.say

        def plain(state):
            return {"out": [model.invoke(say(state, "plain")).content]}

        def streamed(state):
            return {"out": ["".join(chunk.content for chunk in model.stream(say(state, "streamed")))]}

        def batched(state):
            return {"out": [m.content for m in model.batch([say(state, "batched")] * 2)]}

        def thread(state):
            threads = [threading.Thread(target=model.invoke, args=(say(state, "thread"),)) for _ in range(2)]
            for one in threads:
                one.start()
            for one in threads:
                one.join(60)

        def executor(state):
            with ThreadPoolExecutor(2) as pool:
                return {"out": [m.content for m in pool.map(model.invoke, [say(state, "executor")] * 2)]}

        def raw_openai(state):
            prompt = [{"role": "user", "content": say(state, "raw_openai")}]
            raw.chat.completions.create(model="gpt-4o-mini", messages=prompt)

        def per_call(state):
            ChatOpenAI(model="gpt-4o-mini", callbacks=[self.witness], **self.base).invoke(say(state, "per_call"))

        return {
            "plain": plain,
            "streamed": streamed,
            "batched": batched,
            "thread": thread,
            "executor": executor,
            "raw_openai": raw_openai,
            "per_call": per_call,
        }

    def _async_nodes(self):
        model, araw, say = self.model, self.araw, self.say

        async def aplain(state):
            return {"out": [(await model.ainvoke(say(state, "aplain"))).content]}

        async def astreamed(state):
            return {"out": ["".join([chunk.content async for chunk in model.astream(say(state, "astreamed"))])]}

        async def task(state):
            await asyncio.gather(*(asyncio.create_task(model.ainvoke(say(state, "task"))) for _ in range(2)))

        async def in_executor(state):
            await asyncio.get_running_loop().run_in_executor(None, model.invoke, say(state, "in_executor"))
            await asyncio.to_thread(model.invoke, say(state, "in_executor"))

        async def araw_openai(state):
            prompt = [{"role": "user", "content": say(state, "araw_openai")}]
            await model.ainvoke(say(state, "araw_openai") + " by LangChain")  # its run id is not the next call's
            await araw.chat.completions.create(model="gpt-4o-mini", messages=prompt)

        async def loop_of_its_own(state):
            await asyncio.to_thread(asyncio.run, model.ainvoke(say(state, "loop_of_its_own")))

        return {
            "aplain": aplain,
            "astreamed": astreamed,
            "task": task,
            "in_executor": in_executor,
            "araw_openai": araw_openai,
            "loop_of_its_own": loop_of_its_own,
        }

    def _build(self, nodes):
        def fan_out(state):
            return [Send("worker", {"n": state["n"]}) for _ in range(3)]

        def worker(state):
            return {"out": [self.model.invoke(self.say(state, "worker")).content]}

        def inner(state):
            return {"out": [self.model.invoke(self.say(state, "inner")).content]}

        subgraph = StateGraph(State).add_node("inner", inner).add_edge(START, "inner").compile()
        builder = StateGraph(State)
        previous = START
        for name, node in nodes.items():
            builder.add_node(name, node)
            builder.add_edge(previous, name)
            previous = name
        builder.add_node("worker", worker)
        builder.add_node("subgraph", subgraph)
        builder.add_node("aside", lambda state: {"out": [self.model.invoke(self.say(state, "aside")).content]})
        builder.add_conditional_edges(previous, fan_out, ["worker"])
        builder.add_edge("worker", "subgraph")
        builder.add_edge("worker", "aside")  # beside the subgraph, in parallel
        return builder.compile()


@pytest.fixture
def app(provider):
    return Apps(provider.url)


def scope(proxy, number):
    return rollout_scope(proxy.url, f"token-{number}", f"rollout-{number}")


def check(app, proxy, provider, calls, rollouts=ROLLOUTS):
    """Every request: the right token, node, step, namespace, key, run id; the right number of them for each rollout."""
    assert provider.seen == []
    runs = set()
    named = 0
    for seen in proxy.seen:
        number, node, step, at = re.search(WITNESS, seen.prompt).groups()
        namespace = unquote(seen.headers["x-art-checkpoint-ns"])
        assert seen.token == f"token-{number}"
        assert (seen.headers["x-art-node"], seen.headers["x-art-step"], namespace) == (node, step, at)
        assert namespace.endswith(f":{seen.headers['x-art-task-id']}")
        assert "x-art-scope-ended" not in seen.headers
        assert KEY not in repr(seen)
        if "raw" in node and "by LangChain" not in seen.prompt:
            assert "x-art-run-id" not in seen.headers  # LangChain knows nothing of this call
        else:
            named += 1
            assert app.witness.prompts[seen.headers["x-art-run-id"]] == seen.prompt
            runs.add(seen.headers["x-art-run-id"])
    counted = Counter(seen.token for seen in proxy.seen)
    assert counted == {f"token-{number}": calls for number in range(rollouts)}
    assert len(runs) == named  # one run, one request


async def test_ainvoke(app, proxy, provider):
    async def one(number):
        with scope(proxy, number) as inside:
            state = await app.async_graph.ainvoke({"n": number, "out": []})
        assert all(f"witness-{number} " in text for text in state["out"])
        assert inside.counts == {"routed": app.async_calls}

    await asyncio.gather(*(one(number) for number in range(ROLLOUTS)))
    check(app, proxy, provider, app.async_calls)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_ten_thousand_calls(app, proxy, provider):
    rollouts = -(-10_000 // app.async_calls)
    room = asyncio.Semaphore(ROLLOUTS)

    async def one(number):
        async with room:
            with scope(proxy, number) as inside:
                await app.async_graph.ainvoke({"n": number, "out": []})
        assert inside.counts == {"routed": app.async_calls}

    await asyncio.gather(*(one(number) for number in range(rollouts)))
    assert len(proxy.seen) >= 10_000
    check(app, proxy, provider, app.async_calls, rollouts)


def test_invoke_in_threads(app, proxy, provider):
    def one(number):
        with scope(proxy, number):
            return app.sync_graph.invoke({"n": number, "out": []})

    with ThreadPoolExecutor(10) as pool:
        for number, state in enumerate(pool.map(one, range(ROLLOUTS))):
            assert all(f"witness-{number} " in text for text in state["out"])
    check(app, proxy, provider, app.sync_calls)


def test_stream_in_threads(app, proxy, provider):
    def one(number):
        with scope(proxy, number):
            return sum(1 for _ in app.sync_graph.stream({"n": number, "out": []}, stream_mode=["updates", "messages"]))

    with ThreadPoolExecutor(10) as pool:
        assert all(pool.map(one, range(10)))
    check(app, proxy, provider, app.sync_calls, 10)


async def test_astream_and_astream_events(app, proxy, provider):
    async def one(number):
        with scope(proxy, number):
            if number % 2:
                return [event async for event in app.async_graph.astream_events({"n": number, "out": []}, version="v2")]
            modes = ["values", "updates", "messages"]
            return [part async for part in app.async_graph.astream({"n": number, "out": []}, stream_mode=modes)]

    await asyncio.gather(*(one(number) for number in range(10)))
    check(app, proxy, provider, app.async_calls, 10)


def opened(stack, proxy, rollouts):
    for number in range(rollouts):
        inside = open_scope(proxy.url, f"token-{number}", f"rollout-{number}")
        stack.callback(inside.end)


def configs(rollouts):
    return [RunnableConfig(metadata={"art_rollout": f"rollout-{number}"}) for number in range(rollouts)]


def inputs(rollouts):
    return [{"n": number, "out": []} for number in range(rollouts)]


def test_batch_with_metadata(app, proxy, provider):
    with ExitStack() as stack:
        opened(stack, proxy, 20)
        app.sync_graph.batch(inputs(20), configs(20))
        check(app, proxy, provider, app.sync_calls, 20)
        app.model.invoke("the caller is in no scope")
    assert len(provider.seen) == 1


async def test_abatch_and_gather_with_metadata(app, proxy, provider):
    with ExitStack() as stack:
        opened(stack, proxy, 10)
        await app.async_graph.abatch(inputs(5), configs(5))
        rest = zip(inputs(10)[5:], configs(10)[5:], strict=True)
        await asyncio.gather(*(app.async_graph.ainvoke(value, config) for value, config in rest))
        check(app, proxy, provider, app.async_calls, 10)
        await app.async_graph.ainvoke(inputs(1)[0], configs(1)[0])  # in this very task
        assert len(proxy.seen) == 11 * app.async_calls
        await app.model.ainvoke("the caller is in no scope")
    assert len(provider.seen) == 1


def test_sync_stream_in_fresh_contexts_is_repaired(app, proxy, provider):
    import contextvars

    with ExitStack() as stack:
        opened(stack, proxy, 1)
        stream = app.sync_graph.stream(inputs(1)[0], configs(1)[0])
        done = False
        while not done:
            done = contextvars.Context().run(next, stream, None) is None
    check(app, proxy, provider, app.sync_calls, 1)


async def test_tools_that_call_models(app, proxy, provider):
    model = app.model

    @tool
    def ask(n: int) -> str:
        """Ask."""
        return model.invoke(f"witness-{n} node-tools").content

    @tool
    async def aask(n: int) -> str:
        """Ask."""
        return (await model.ainvoke(f"witness-{n} node-tools")).content

    class Chat(TypedDict):
        messages: Annotated[list, operator.add]

    bound = model.bind_tools([ask, aask])

    async def agent(state):
        return {"messages": [await bound.ainvoke(state["messages"])]}

    def reply(body):
        last = body["messages"][-1]
        if last["role"] != "user" or "node-agent" not in last["content"]:
            return None
        number = re.search(r"witness-(\d+)", last["content"])[1]
        calls = [
            {
                "id": f"{name}-{number}",
                "type": "function",
                "function": {"name": name, "arguments": f'{{"n": {number}}}'},
            }
            for name in ("ask", "aask")
        ]
        return {"role": "assistant", "content": None, "tool_calls": calls}

    proxy.reply = reply
    builder = StateGraph(Chat).add_node("agent", agent).add_node("tools", ToolNode([ask, aask]))
    builder.add_edge(START, "agent").add_edge("tools", "agent")
    more = lambda state: "tools" if getattr(state["messages"][-1], "tool_calls", None) else END  # noqa: E731
    graph = builder.add_conditional_edges("agent", more, ["tools", END]).compile()

    async def one(number):
        with scope(proxy, number):
            state = await graph.ainvoke({"messages": [{"role": "user", "content": f"witness-{number} node-agent"}]})
        assert isinstance(state["messages"][-1], AIMessage)

    await asyncio.gather(*(one(number) for number in range(ROLLOUTS)))
    assert provider.seen == []
    assert Counter(seen.token for seen in proxy.seen) == {f"token-{number}": 4 for number in range(ROLLOUTS)}
    for seen in proxy.seen:
        # The agent's second request begins with its first; a tool's is a conversation of its own.
        number, node = re.search(r"witness-(\d+) node-(\w+)", str(seen.body["messages"][0])).groups()
        assert (seen.token, seen.headers["x-art-node"]) == (f"token-{number}", node)


def test_several_event_loops_with_one_model(app, proxy, provider):
    async def one(number):
        with scope(proxy, number):
            await app.model.ainvoke(f"witness-{number}")

    async def some(numbers):
        await asyncio.gather(*(one(number) for number in numbers))

    for first in (0, 5, 10):
        asyncio.run(some(range(first, first + 5)))
    assert Counter(seen.token for seen in proxy.seen) == {f"token-{number}": 1 for number in range(15)}
    assert provider.seen == []


async def test_really_at_once(app, proxy, provider):
    """All fifty requests are at the server together before one is answered."""
    proxy.gate = ROLLOUTS

    async def one(number):
        with scope(proxy, number):
            answer = await app.model.ainvoke(f"witness-{number}")
        assert answer.content == f"echo witness-{number}"

    async with asyncio.timeout(60):
        await asyncio.gather(*(one(number) for number in range(ROLLOUTS)))
    assert all(seen.token == "token-" + seen.prompt.removeprefix("witness-") for seen in proxy.seen)


def test_outside_every_scope_the_provider_is_asked(app, proxy, provider):
    app.sync_graph.invoke({"n": 1, "out": []})
    assert proxy.seen == []
    assert len(provider.seen) == app.sync_calls
    assert {seen.token for seen in provider.seen} == {KEY}
    assert not [name for seen in provider.seen for name in seen.headers if name.startswith("x-art")]
