"""Models of other providers: inside a scope the policy answers, and their own provider hears nothing."""

import asyncio
import gc
import json
from typing import TypedDict

import pytest
from art_backends.capture import rollout_scope
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_google_genai import ChatGoogleGenerativeAI
from langchain_ollama import ChatOllama
from langgraph.graph import START, StateGraph
from pydantic import BaseModel

from art_langgraph import providers

pytestmark = [
    pytest.mark.usefixtures("hooked", "collected"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # sockets that the SDKs leave open
]

KEY = "sk-secret-of-the-user"
KINDS = ["anthropic", "google", "ollama"]


@pytest.fixture
def collected():
    yield
    gc.collect()  # what an SDK leaves open is not the next test's


def make(kind, url, **options):
    if kind == "anthropic":
        return ChatAnthropic(model="claude-haiku-4-5", base_url=url, api_key=KEY, max_retries=0, **options)
    if kind == "google":
        return ChatGoogleGenerativeAI(model="gemini-3-pro", base_url=url, api_key=KEY, max_retries=0, **options)
    return ChatOllama(model="llama3.2", base_url=url, **options)


NAMES = {"anthropic": "claude-haiku-4-5", "google": "gemini-3-pro", "ollama": "llama3.2"}


def scope(proxy, models=()):
    return rollout_scope(proxy.url, "token", "rollout", models)


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


class Weather(BaseModel):
    """Weather."""

    city: str
    degrees: int


async def everyway(model, prompt):
    """Invoke, ainvoke, stream, astream, in threads and in tasks."""
    return [
        model.invoke(prompt).text,
        (await model.ainvoke(prompt)).text,
        (await asyncio.to_thread(model.invoke, prompt)).text,
        "".join(chunk.text for chunk in model.stream(prompt)),
        "".join([chunk.text async for chunk in model.astream(prompt)]),
    ]


@pytest.mark.parametrize("kind", KINDS)
async def test_every_way_of_calling_reaches_the_policy(kind, proxy, provider):
    model = make(kind, provider.url)
    with scope(proxy) as inside:
        assert await everyway(model, "hello there") == ["echo hello there"] * 5
    assert provider.seen == []
    assert [seen.path for seen in proxy.seen] == ["/v1/chat/completions"] * 5
    assert {seen.body["model"] for seen in proxy.seen} == {NAMES[kind]}
    assert [bool(seen.body.get("stream")) for seen in proxy.seen] == [False] * 3 + [True] * 2
    assert len({seen.headers["x-art-run-id"] for seen in proxy.seen}) == 5
    assert KEY not in repr(proxy.seen)
    assert inside.counts == {"routed": 5}


@pytest.mark.parametrize("kind", KINDS)
def test_outside_a_scope_and_for_other_names_the_provider_is_asked(kind, proxy, provider):
    model = make(kind, provider.url)
    provider.fail_next = [400, 400]
    with pytest.raises(Exception):  # noqa: B017 - each SDK has an error of its own
        model.invoke("outside")
    with scope(proxy, ["another-model"]) as inside, pytest.raises(Exception):  # noqa: B017
        model.invoke("not ours")
    assert len(provider.seen) == 2
    assert proxy.seen == []
    assert inside.counts["other_model"] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_tools_and_settings_of_the_app_are_passed_on(kind, proxy, provider):
    most = {"anthropic": "max_tokens", "google": "max_output_tokens", "ollama": "num_predict"}[kind]
    model = make(kind, provider.url, temperature=0.25, **{most: 77}).bind_tools([weather])
    with scope(proxy):
        model.invoke("ask", stop=["END"])
    (seen,) = proxy.seen
    function = seen.body["tools"][0]["function"]
    assert function["name"] == "weather"
    assert function["description"] == "The weather in a city."
    assert function["parameters"]["properties"]["city"]["type"] == "string"
    assert function["parameters"]["required"] == ["city"]
    assert (seen.body["temperature"], seen.body["max_completion_tokens"]) == (0.25, 77)
    assert seen.body["stop"] == ["END"]
    assert "tool_choice" not in seen.body


@pytest.mark.parametrize("kind", KINDS)
def test_a_providers_defaults_are_no_wishes(kind, proxy, provider):
    with scope(proxy):
        make(kind, provider.url).invoke("ask")
        if kind == "anthropic":
            ChatAnthropic(model="claude-unheard-of", api_key=KEY).invoke("ask")
    for seen in proxy.seen:
        assert not {"temperature", "max_completion_tokens", "max_tokens", "stop", "top_p"} & seen.body.keys()


@pytest.mark.parametrize("kind", ["anthropic", "google"])
@pytest.mark.parametrize(("wish", "wire"), [("any", "required"), ("auto", "auto"), ("weather", "weather")])
def test_tool_choice(kind, wish, wire, proxy, provider):
    with scope(proxy):
        make(kind, provider.url).bind_tools([weather], tool_choice=wish).invoke("ask")
    choice = proxy.seen[0].body["tool_choice"]
    assert (choice if isinstance(choice, str) else choice["function"]["name"]) == wire


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_structured_output(kind, method, proxy, provider):
    said = {"city": "Oslo", "degrees": 3}

    def reply(body):
        if "response_format" in body:
            return {"role": "assistant", "content": json.dumps(said)}
        call = {"name": "Weather", "arguments": json.dumps(said)}
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": call}],
        }

    proxy.reply = reply
    with scope(proxy):
        found = make(kind, provider.url).with_structured_output(Weather, method=method).invoke("ask")
    assert found == Weather(**said)
    body = proxy.seen[0].body
    if method == "json_schema":
        assert body["response_format"]["json_schema"]["schema"]["properties"].keys() == said.keys()
    else:
        assert body["tools"][0]["function"]["name"] == "Weather"
        assert body.get("tool_choice", "auto") != "required"
    assert provider.seen == []


@pytest.mark.parametrize("kind", KINDS)
async def test_an_agent_with_tools_keeps_its_history(kind, proxy, provider):
    def reply(body):
        if body["messages"][-1]["role"] == "tool":
            return {"role": "assistant", "content": "It is sunny."}
        call = {"name": "weather", "arguments": '{"city": "Oslo"}'}
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": call}],
        }

    proxy.reply = reply
    agent = create_agent(make(kind, provider.url), [weather], system_prompt="Be brief.")
    with scope(proxy):
        state = await agent.ainvoke({"messages": [{"role": "user", "content": "Weather in Oslo?"}]})
    assert state["messages"][-1].text == "It is sunny."
    assert provider.seen == []
    first, second = (seen.body["messages"] for seen in proxy.seen)
    assert [message["role"] for message in second] == ["system", "user", "assistant", "tool"]
    assert second[: len(first)] == first
    assert second[2]["tool_calls"][0]["id"] == second[3]["tool_call_id"] == "c1"
    assert second[3]["content"] == "sunny in Oslo"
    assert {seen.headers["x-art-node"] for seen in proxy.seen} == {"model"}


def test_a_tool_that_only_the_provider_has_is_left_to_it_and_counted(proxy, provider):
    model = make("anthropic", provider.url)
    provider.fail_next = [400]
    search = {"type": "web_search_20250305", "name": "web_search"}
    with scope(proxy) as inside, pytest.raises(Exception):  # noqa: B017
        model.bind_tools([search]).invoke("ask")
    assert (len(provider.seen), len(proxy.seen)) == (1, 0)
    assert inside.details["not_captured"] == {"ChatAnthropic: the provider's own tool web_search": 1}


def test_the_policys_errors_are_the_openai_sdks(proxy, provider):
    import openai

    proxy.fail_next = [400]
    with scope(proxy), pytest.raises(openai.BadRequestError):
        make("anthropic", provider.url).invoke("ask")


class Careful(ChatAnthropic):
    """An app's own way with a provider's model."""

    def _generate(self, messages, *args, **kwargs):
        return super()._generate([*messages, HumanMessage("and be careful")], *args, **kwargs)


def test_what_an_app_makes_of_a_providers_class_stays(proxy, provider):
    model = Careful(model="claude-haiku-4-5", base_url=provider.url, api_key=KEY)
    assert providers.is_delegated(Careful)
    with scope(proxy):
        model.invoke("ask")
    assert [message["content"] for message in proxy.seen[0].body["messages"]] == ["ask", "and be careful"]
    assert provider.seen == []


class OwnModel(FakeListChatModel):
    """A chat model of the app's own."""


def test_a_class_of_the_apps_own_is_left_alone_until_it_is_named(proxy, monkeypatch):
    model = OwnModel(responses=["its own words"])
    with scope(proxy) as inside:
        assert model.invoke("ask").text == "its own words"
    assert inside.details["no_request"] == {"OwnModel": 1}

    monkeypatch.setattr(providers, "_added", set())
    providers.delegate(OwnModel)
    with scope(proxy):
        assert model.invoke("ask").text == "echo ask"
    assert proxy.seen[0].body["model"] == "OwnModel"
    assert model.invoke("ask").text == "its own words"


def test_uninstalling_restores_the_original_methods():
    from art_langgraph import hook

    before = ChatAnthropic.__dict__["_generate"]
    providers.uninstall()
    try:
        original = ChatAnthropic.__dict__["_generate"]
        assert original is not before
        assert original.__module__.startswith("langchain_anthropic")
        assert not hasattr(original, "__wrapped__")
    finally:
        providers.install()
    assert hook.HOOK.enabled
    assert ChatAnthropic.__dict__["_generate"].__wrapped__ is original


async def test_fifty_rollouts_at_once_share_one_model(proxy, provider):
    class State(TypedDict):
        n: int
        said: str

    model = make("anthropic", provider.url)

    async def ask(state):
        return {"said": (await model.ainvoke(f"witness-{state['n']}")).text}

    graph = StateGraph(State).add_node("ask", ask).add_edge(START, "ask").compile()

    async def one(number):
        with rollout_scope(proxy.url, f"token-{number}", f"rollout-{number}"):
            state = await graph.ainvoke({"n": number})
        assert state["said"] == f"echo witness-{number}"

    await asyncio.gather(*(one(number) for number in range(50)))
    assert provider.seen == []
    assert sorted(seen.token for seen in proxy.seen) == sorted(f"token-{number}" for number in range(50))
    assert all(seen.token == "token-" + seen.prompt.removeprefix("witness-") for seen in proxy.seen)
