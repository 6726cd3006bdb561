"""The openai SDK's requests inside and outside a scope, seen by the servers at both ends."""

import asyncio
import os

import openai
import pytest
from art_backends.capture import openai_route, rollout_scope
from art_backends.failures import fault_of
from openai import AsyncAzureOpenAI, AsyncOpenAI, AzureOpenAI, OpenAI
from openai._base_client import AsyncAPIClient, SyncAPIClient

KEY = "sk-the-users-own-secret"
MESSAGES = [{"role": "user", "content": "witness ü"}]


def make(kind, provider, **options):
    return kind(
        base_url=provider.url + "/v1",
        api_key=KEY,
        organization="org-secret",
        project="proj-secret",
        default_headers={"X-Gateway-Key": "gateway-secret"},
        **options,
    )


@pytest.fixture
def client(provider):
    with make(OpenAI, provider) as client:
        yield client


def ask(client, **options):
    return client.chat.completions.create(model="gpt-4o-mini", messages=MESSAGES, **options)


def assert_no_secret(seen):
    text = repr(seen).lower()
    assert KEY not in text
    assert "secret" not in text


def test_a_request_inside_a_scope_reaches_the_proxy_and_no_secret_does(captured, proxy, provider, client):
    with rollout_scope(proxy.url, "token-1", "r1") as scope:
        answer = ask(client)
    assert answer.choices[0].message.content == "echo witness ü"
    assert provider.seen == []
    [seen] = proxy.seen
    assert (seen.path, seen.token, seen.prompt) == ("/v1/chat/completions", "token-1", "witness ü")
    assert seen.headers["x-stainless-retry-count"] == "0"
    assert_no_secret(proxy.seen)
    assert scope.counts == {"routed": 1}


def test_outside_a_scope_nothing_changes(captured, proxy, provider, client):
    ask(client)
    assert proxy.seen == []
    [seen] = provider.seen
    assert seen.token == KEY
    assert seen.headers["openai-organization"] == "org-secret"
    assert not [name for name in seen.headers if name.startswith("x-art")]


def test_base_url_may_end_with_v1_or_not(captured, proxy, client):
    for root in (proxy.url, proxy.url + "/", proxy.url + "/v1", proxy.url + "/v1/"):
        with rollout_scope(root, "t", "r"):
            ask(client)
    assert {seen.path for seen in proxy.seen} == {"/v1/chat/completions"}


async def test_async_and_streaming(captured, proxy, provider, client):
    async with make(AsyncOpenAI, provider) as aclient:
        with rollout_scope(proxy.url, "t", "r"):
            assert (await ask(aclient)).choices[0].message.content == "echo witness ü"
            stream = await ask(aclient, stream=True)
            assert "".join([c.choices[0].delta.content or "" async for c in stream]) == "echo witness ü"
            assert "".join(c.choices[0].delta.content or "" for c in ask(client, stream=True)) == "echo witness ü"
            raw = await aclient.chat.completions.with_raw_response.create(model="m", messages=MESSAGES)
            assert raw.status_code == 200
            assert raw.parse().choices[0].message.content == "echo witness ü"
    assert len(proxy.seen) == 4
    assert provider.seen == []
    assert_no_secret(proxy.seen)


def test_retries_keep_their_count_and_the_token(captured, proxy, provider, client):
    proxy.fail_next = [500, 429]
    with rollout_scope(proxy.url, "t", "r"):
        ask(client)
    assert [seen.headers["x-stainless-retry-count"] for seen in proxy.seen] == ["0", "1", "2"]
    assert {seen.token for seen in proxy.seen} == {"t"}


def test_error_types_are_the_sdks(captured, proxy, provider):
    with make(OpenAI, provider, max_retries=0) as client:
        proxy.fail_next = [400]
        with rollout_scope(proxy.url, "t", "r"), pytest.raises(openai.BadRequestError, match="again"):
            ask(client)
        with rollout_scope("http://127.0.0.1:9", "t", "r"), pytest.raises(openai.APIConnectionError):
            ask(client)
    assert provider.seen == []


def test_timeouts_are_the_callers(captured, proxy, provider):
    proxy.gate = 2  # never reached: the server does not answer
    client = make(OpenAI, provider, max_retries=0)
    with client, rollout_scope(proxy.url, "t", "r"), pytest.raises(openai.APITimeoutError):
        ask(client, timeout=0.2)
    assert len(proxy.seen) == 1
    proxy.release()


@pytest.mark.parametrize("given", ["per-model", "deployment"])
async def test_azure_deployments_become_models(captured, proxy, provider, given):
    options = {"azure_endpoint": provider.url, "api_key": KEY, "api_version": "2024-10-21"}
    if given == "deployment":
        options["azure_deployment"] = "my-gpt"
    with AzureOpenAI(**options) as client, rollout_scope(proxy.url, "t", "r"):
        client.chat.completions.create(model="my-gpt", messages=MESSAGES)
    async with AsyncAzureOpenAI(**options) as aclient:
        with rollout_scope(proxy.url, "t", "r"):
            await aclient.chat.completions.create(model="my-gpt", messages=MESSAGES)
    assert provider.seen == []
    for seen in proxy.seen:
        assert (seen.path, seen.query, seen.body["model"]) == ("/v1/chat/completions", "", "my-gpt")
        assert "api-key" not in seen.headers
    assert_no_secret(proxy.seen)


def test_only_the_named_models_are_routed(captured, proxy, provider, client):
    with rollout_scope(proxy.url, "t", "r", models=["gpt-4o-mini"]) as scope:
        ask(client)
        client.chat.completions.create(model="judge", messages=MESSAGES)
    assert [seen.body["model"] for seen in proxy.seen] == ["gpt-4o-mini"]
    assert [(seen.body["model"], seen.token) for seen in provider.seen] == [("judge", KEY)]
    assert scope.counts == {"routed": 1, "other_model": 1}
    assert scope.details == {"other_model": {"judge": 1}}


@pytest.mark.parametrize("trouble", [500, "away"])
def test_an_error_tells_whether_it_is_the_providers_or_the_engines(captured, proxy, provider, trouble):
    faults = {}
    for model in ("gpt-4o-mini", "judge"):
        if trouble == 500:
            proxy.fail_next, provider.fail_next = [500], [500]
        url, base_url = (proxy.url, provider.url) if trouble == 500 else ("http://127.0.0.1:9", "http://127.0.0.1:9")
        with (
            OpenAI(base_url=base_url + "/v1", api_key=KEY, max_retries=0) as client,
            rollout_scope(url, "t", "r", models=["gpt-4o-mini"]),
            pytest.raises(openai.APIError) as caught,
        ):
            client.chat.completions.create(model=model, messages=MESSAGES)
        wrapped = RuntimeError("the app's own")
        wrapped.__cause__ = caught.value
        faults[model] = fault_of(wrapped)
    assert faults["gpt-4o-mini"].startswith("engine: ")
    assert faults["judge"].startswith("the provider 127.0.0.1, of a model that is not the policy's: ")


def test_other_paths_go_where_they_went(captured, proxy, provider, client):
    with rollout_scope(proxy.url, "t", "r") as scope:
        client.embeddings.create(model="e", input="x", encoding_format="float")
        client.models.list()
    assert [(seen.path, seen.token) for seen in provider.seen] == [("/v1/embeddings", KEY)]
    assert [seen.path for seen in proxy.seen] == ["/v1/models"]
    assert scope.counts == {"routed": 1, "not_captured": 1}


def test_after_the_end_a_straggler_is_served_and_marked(captured, proxy, provider, client):
    import contextvars

    with rollout_scope(proxy.url, "t", "r") as scope:
        context = contextvars.copy_context()
    context.run(ask, client)
    [seen] = proxy.seen
    assert (seen.token, seen.headers["x-art-scope-ended"]) == ("t", "1")
    assert scope.counts == {"after_end": 1}
    ask(client)
    assert len(provider.seen) == 1


def test_several_event_loops_with_one_client(captured, proxy, provider):
    aclient = make(AsyncOpenAI, provider)
    with rollout_scope(proxy.url, "t", "r"):
        for _ in range(3):
            asyncio.run(_twice(aclient))
    assert len(proxy.seen) == 6  # no ghost completion of a request repeated on a dead loop


async def _twice(aclient):
    await asyncio.gather(ask(aclient), ask(aclient))


def test_proxies_of_the_environment_are_ignored(captured, proxy, provider, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with make(OpenAI, provider) as client, rollout_scope(proxy.url, "t", "r"):
        ask(client)
    assert len(proxy.seen) == 1


def test_our_own_trouble_never_reaches_the_agent(captured, provider, client):
    with rollout_scope("http://host:no-port", "t", "r") as scope:
        ask(client)
    assert len(provider.seen) == 1
    assert scope.counts == {"route_errors": 1}


def test_uninstalling_restores_the_original_objects(client):
    from art_backends import capture

    places = [(kind, "_send_request") for kind in (SyncAPIClient, AsyncAPIClient, OpenAI, AsyncOpenAI)]
    places += [(kind, "request") for kind in (SyncAPIClient, AsyncAPIClient)]
    before = [vars(kind).get(name) for kind, name in places]
    capture.install()
    capture.install()
    assert [vars(kind).get(name) for kind, name in places] != before
    capture.uninstall()
    assert [vars(kind).get(name) for kind, name in places] != before
    capture.uninstall()
    assert all(vars(kind).get(name) is old for (kind, name), old in zip(places, before, strict=True))
    capture.uninstall()


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("POST", "/v1/chat/completions", ("chat/completions", None)),
        ("POST", "/some/gateway/v1/completions", ("completions", None)),
        ("POST", "/v1/responses", ("responses", None)),
        ("GET", "/v1/responses/abc", ("responses/abc", None)),
        ("GET", "/v1/models", ("models", None)),
        ("GET", "/v1/models/gpt", ("models/gpt", None)),
        ("POST", "/openai/deployments/d/chat/completions", ("chat/completions", "d")),
        ("POST", "/openai/v1/chat/completions", ("chat/completions", None)),
        ("POST", "/v1/embeddings", None),
        ("POST", "/v1/chat/completions/abc", None),
        ("GET", "/v1/chat/completions", None),
        ("DELETE", "/v1/models/gpt", None),
        ("POST", "/v1/audio/speech", None),
    ],
)
def test_which_paths_are_ours(method, path, expected):
    assert openai_route.match(method, path) == expected


def test_forked_children_have_clients_of_their_own(monkeypatch):
    httpx = openai_route.library_of(openai_route.OpenAI(api_key="x")._client)
    clients = openai_route.Clients()
    one = clients.sync(httpx, False)
    assert clients.sync(httpx, False) is one
    monkeypatch.setattr(os, "getpid", lambda: -1)
    other = clients.sync(httpx, False)
    assert other is not one
    clients.close()
    assert one.is_closed
    assert other.is_closed
