"""The LangChain hook: nodes told and taken back, caches noticed, never a disturbance."""

import asyncio
from collections import Counter
from typing import TypedDict

import pytest
from art_backends.capture import current_node, current_scope, rollout_scope
from langchain.agents import create_agent
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.globals import set_llm_cache
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, RetryPolicy, interrupt

from art_langgraph import hook


class State(TypedDict, total=False):
    n: int
    seen: list


def scope(proxy):
    return rollout_scope(proxy.url, "token", "rollout")


def make_model(provider, **options):
    return ChatOpenAI(model="m", base_url=provider.url + "/v1", api_key="k", **options)


def test_a_node_is_told_while_it_runs_and_not_after(hooked, proxy):
    def look(state):
        node = current_node()
        return {"seen": [node.name, node.step, node.task_id, node.checkpoint_ns, node.run_id]}

    graph = StateGraph(State).add_node("look", look).add_edge(START, "look").compile()
    with scope(proxy):
        name, step, task, namespace, run_id = graph.invoke({"n": 1})["seen"]
        assert current_node() is None
    assert (name, step, run_id) == ("look", 1, None)
    assert namespace == f"look:{task}"


async def test_a_models_run_id_ends_with_its_call(hooked, proxy, provider):
    model = make_model(provider)
    with scope(proxy):
        await model.ainvoke("one")
        assert current_node() is None
        model.invoke("two")
        assert current_node() is None
        proxy.fail_next = [400]
        with pytest.raises(Exception, match="again"):
            await model.ainvoke("three")
        assert current_node() is None
    runs = [seen.headers["x-art-run-id"] for seen in proxy.seen]
    assert len(set(runs)) == 3
    assert all("x-art-node" not in seen.headers for seen in proxy.seen)


async def test_sdk_retries_have_one_run_id(hooked, proxy, provider):
    proxy.fail_next = [500]
    with scope(proxy):
        await make_model(provider).ainvoke("one")
    assert len({seen.headers["x-art-run-id"] for seen in proxy.seen}) == 1
    assert [seen.headers["x-stainless-retry-count"] for seen in proxy.seen] == ["0", "1"]


def test_a_retried_node_keeps_its_task(hooked, proxy, provider):
    model = make_model(provider)
    attempts = []

    def unsure(state):
        attempts.append(model.invoke("x"))
        if len(attempts) < 2:
            raise ConnectionError("try again")

    policy = RetryPolicy(initial_interval=0.001, max_attempts=3)
    graph = StateGraph(State).add_node("unsure", unsure, retry_policy=policy).add_edge(START, "unsure").compile()
    with scope(proxy):
        graph.invoke({"n": 1})
    assert len({seen.headers["x-art-task-id"] for seen in proxy.seen}) == 1
    assert len({seen.headers["x-art-run-id"] for seen in proxy.seen}) == 2


def test_several_prompts_in_one_generate_have_no_run_id(hooked, proxy, provider):
    with scope(proxy) as inside:
        make_model(provider).generate([[HumanMessage("one")], [HumanMessage("two")]])
    assert len(proxy.seen) == 2
    assert all("x-art-run-id" not in seen.headers for seen in proxy.seen)
    assert inside.counts == {"routed": 2}


def test_names_in_headers_are_percent_encoded(hooked, proxy, provider):
    model = make_model(provider)
    graph = StateGraph(State).add_node("größe 1", lambda state: {"seen": [model.invoke("x").content]})
    graph = graph.add_edge(START, "größe 1").compile()
    with scope(proxy):
        graph.invoke({"n": 1})
    assert proxy.seen[0].headers["x-art-node"] == "gr%C3%B6%C3%9Fe%201"


def test_cached_answers_are_counted(hooked, proxy, provider):
    set_llm_cache(InMemoryCache())
    try:
        with scope(proxy) as inside:
            model = make_model(provider)
            model.invoke("same")
            model.invoke("same")
    finally:
        set_llm_cache(None)
    assert len(proxy.seen) == 1
    assert inside.counts == {"routed": 1, "no_request": 1}
    assert inside.details["no_request"] == {"ChatOpenAI": 1}


def test_models_of_other_providers_are_named(hooked, proxy):
    with scope(proxy) as inside:
        FakeListChatModel(responses=["x"]).invoke("y")
    assert inside.details == {"no_request": {"FakeListChatModel": 1}}


def test_metadata_names_the_rollout_and_its_end_gives_the_scope_back(hooked, proxy):
    from art_backends.capture import open_scope

    def look(state):
        return {"seen": [current_scope().rollout_id]}

    graph = StateGraph(State).add_node("look", look).add_edge(START, "look").compile()
    other = open_scope(proxy.url, "t", "other")
    config = {"metadata": {hook.ROLLOUT_KEY: "other"}}
    assert graph.invoke({"n": 1}, config)["seen"] == ["other"]
    assert current_scope() is None
    with scope(proxy) as mine:
        assert graph.invoke({"n": 1}, config)["seen"] == ["other"]
        assert asyncio.run(graph.ainvoke({"n": 1}, config))["seen"] == ["other"]
        assert current_scope() is mine
        other.end()
        assert graph.invoke({"n": 1}, config)["seen"] == ["rollout"]
    assert current_scope() is None
    unknown = {"metadata": {hook.ROLLOUT_KEY: "never heard of"}}
    with scope(proxy):
        assert graph.invoke({"n": 1}, unknown)["seen"] == ["rollout"]


def test_trouble_of_ours_stays_ours(hooked, proxy, provider):
    with scope(proxy) as inside:
        answer = make_model(provider).invoke("x", {"metadata": {hook.ROLLOUT_KEY: ["not", "hashable"]}})
    assert answer.content == "echo x"
    assert inside.counts["hook_errors"] == 1
    hooked.errors -= 1


def test_the_users_own_handlers_see_everything(hooked, proxy, provider):
    events = []

    class Mine(BaseCallbackHandler):
        def on_chat_model_start(self, *args, **kwargs):
            events.append("start")

        def on_llm_end(self, *args, **kwargs):
            events.append("end")

    with scope(proxy):
        make_model(provider).invoke("x", {"callbacks": [Mine()]})
    assert events == ["start", "end"]


EVENTS = ("chat_model_start", "llm_end", "chain_start", "chain_end", "llm_error", "llm_new_token")


def handler(inline, note, **options):
    """A handler of the app's own that notes each event's name."""
    methods = {f"on_{name}": lambda self, *args, _name=name, **kwargs: note(_name) for name in EVENTS}
    return type("Handler", (BaseCallbackHandler,), {**methods, "run_inline": inline, **options})()


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
@pytest.mark.parametrize("ours_fails", [False, True])
async def test_r30_handlers_that_raise_disturb_neither_the_agent_nor_the_others(
    inline, way, ours_fails, hooked, proxy, provider, monkeypatch
):
    def boom(name):
        raise RuntimeError(f"boom in {name}")

    seen = {when: Counter() for when in ("plain", "captured")}
    model = make_model(provider)

    def ask(state):
        return {"seen": [model.invoke("x").text]}

    graph = StateGraph(State).add_node("ask", ask).add_edge(START, "ask").compile()

    async def run(when):
        note = seen[when].update
        callbacks = [handler(inline, boom), handler(not inline, lambda name: note([name])), handler(inline, boom)]
        value, config = {"n": 1}, {"callbacks": callbacks}
        return graph.invoke(value, config) if way == "invoke" else await graph.ainvoke(value, config)

    plain = await run("plain")
    if ours_fails:
        monkeypatch.setattr(hook, "_node", boom)
    with scope(proxy) as inside:
        assert await run("captured") == plain
    assert seen["captured"] == seen["plain"]
    assert seen["plain"].keys() == {"chat_model_start", "llm_end", "chain_start", "chain_end"}
    (request,) = proxy.seen
    assert request.token == "token"
    if ours_fails:
        assert inside.counts["hook_errors"] > 0  # the loss is counted
        hooked.errors -= inside.counts["hook_errors"]
    else:
        assert inside.counts == {"routed": 1}
        assert request.headers["x-art-node"] == "ask"


def test_abandoned_runs_do_not_pile_up(hooked, proxy, monkeypatch):
    from uuid import uuid4

    monkeypatch.setattr(hook, "_MOST_RUNS", 3)
    with scope(proxy):
        for step in range(10):
            hooked.on_chain_start(None, None, run_id=uuid4(), metadata={"langgraph_node": "a", "langgraph_step": step})
        assert len(hooked._runs) == 3
    hooked._runs.clear()


def test_uninstalled_it_says_nothing(proxy, provider):
    hook.install()
    hook.install()
    hook.uninstall()
    assert hook.HOOK.enabled
    hook.uninstall()
    hook.uninstall()
    assert not hook.HOOK.enabled
    with scope(proxy) as inside:
        FakeListChatModel(responses=["x"]).invoke("y")
    assert inside.counts == {}


@pytest.mark.parametrize(
    ("namespace", "task"),
    [(None, None), ("", None), ("a:1", "1"), ("a:1|b:2", "2"), ("a:1|b:2|7", "2"), ("odd", None)],
)
def test_the_task_of_a_checkpoint_namespace(namespace, task):
    assert hook.task_of(namespace) == task


def runs_of(proxy):
    """Of each request: its prompt, and which run of which task it came from."""
    return [(seen.prompt, seen.headers["x-art-task-id"], seen.headers.get("x-art-node-run-id")) for seen in proxy.seen]


def test_runs_of_a_node_for_one_task_are_told_apart(hooked, proxy, provider):
    model = make_model(provider)
    tries = []

    def flaky(state):
        model.invoke("flaky one")
        model.invoke("flaky two")
        tries.append(1)
        if len(tries) < 2:
            raise ValueError("again, please")

    def ask(state):
        model.invoke("ask")
        interrupt("may I?")

    retry = RetryPolicy(initial_interval=0.01, retry_on=ValueError)
    builder = StateGraph(State).add_node("flaky", flaky, retry_policy=retry).add_node("ask", ask)
    graph = builder.add_edge(START, "flaky").add_edge("flaky", "ask").compile(checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "1"}}
    with scope(proxy):
        graph.invoke({"n": 1}, config)
        graph.invoke(Command(resume="yes"), config)
    seen = runs_of(proxy)
    assert [prompt for prompt, *_ in seen] == ["flaky one", "flaky two"] * 2 + ["ask"] * 2
    (one, two, again, again_two, ask_one, ask_two) = seen
    assert one[1:] == two[1:]
    assert again[1:] == again_two[1:]
    assert one[1] == again[1]
    assert one[2] != again[2]
    assert ask_one[1] == ask_two[1] != one[1]
    assert len({one[2], again[2], ask_one[2], ask_two[2]}) == 4


def test_a_task_of_the_functional_api_is_a_node_whose_result_is_kept(hooked, proxy, provider):
    model = make_model(provider)

    @task
    def look(n: int) -> int:
        model.invoke("task")
        return n

    @entrypoint(checkpointer=InMemorySaver())
    def work(n: int) -> int:
        look(n).result()
        model.invoke("entry")
        interrupt("may I?")
        return n

    config = {"configurable": {"thread_id": "1"}}
    with scope(proxy):
        work.invoke(1, config)
        work.invoke(Command(resume="yes"), config)
    (one, entry, entry_again) = runs_of(proxy)
    assert [one[0], entry[0], entry_again[0]] == ["task", "entry", "entry"]
    assert entry[1] == entry_again[1] != one[1]
    assert len({one[2], entry[2], entry_again[2]}) == 3


def test_an_agent_tells_its_name_and_a_node_of_the_same_name_is_one_run(hooked, proxy, provider):
    agent = create_agent(make_model(provider), [], name="researcher")
    team = StateGraph(MessagesState).add_node("researcher", agent).add_edge(START, "researcher").compile()
    with scope(proxy):
        agent.invoke({"messages": [HumanMessage("alone")]})
        team.invoke({"messages": [HumanMessage("in a team")]})
    alone, within = proxy.seen
    assert alone.headers["x-art-agent"] == within.headers["x-art-agent"] == "researcher"
    assert alone.headers["x-art-node"] == within.headers["x-art-node"] == "model"
    assert within.headers["x-art-checkpoint-ns"].startswith("researcher%3A")
    assert alone.headers["x-art-node-run-id"] != within.headers["x-art-node-run-id"]
