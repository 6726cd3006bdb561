"""Rows S1-S5, S7, S9: who may call what, decided on the raw path and the token alone."""

import asyncio
import logging
from typing import Any

import httpx
import openai
import pytest
from art_backends.server.auth import HostRules, is_loopback
from art_backends.trajectories import CallStatus

CONTROL = [
    "/metrics",
    "/control/v1/status",
    "/control/v1/rollouts",
    "/control/v1/steps?policy=policy",
    "/control/v1/steps/1",
]
UPSTREAM_ONLY = [
    "/pause",
    "/update_weights",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/invocations",
    "/tokenize",
    "/detokenize",
    "/metrics.json",
    "/train",
    "/v1/embeddings",
    "/v1",
    "/v1/",
    "/",
    "/docs",
    "/openapi.json",
    "/v1/chat/completions/",
    "/v1/chat/completions/../../control/v1/status",
    "//control/v1/status",
    "/CONTROL/v1/status",
    "/r/short/v1/models",
]
OTHER = {"authorization": "Bearer sk-of-somewhere-else"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def raw(server: Any, lines: str) -> tuple[int, str]:
    """Send bytes as they are; returns status and everything that came back until the connection closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    writer.write(lines.replace("\n", "\r\n").encode())
    await writer.drain()
    async with asyncio.timeout(20):
        answer = (await reader.read()).decode()
    writer.close()
    return int(answer.split(" ", 2)[1]), answer


async def test_the_matrix_of_tokens_and_routes(start: Any) -> None:
    async with start() as server:
        rollout = await server.open()
        bearers = {"admin": server.admin, "agent": server.agent, "rollout": rollout.token}
        wrong = []

        async def expect(status: int, method: str, path: str, bearer: str | None, **more: Any) -> None:
            headers = {} if bearer is None else {"authorization": bearer}
            reply = await server.http.request(method, path, headers=headers | more.pop("headers", {}), **more)
            if reply.status_code != status:
                wrong.append((method, path, bearer and bearer[:12], status, reply.status_code))
            if reply.status_code >= 400:
                assert set(reply.json()["error"]) >= {"code", "message"}, path

        for path in CONTROL:
            for kind, token in bearers.items():
                ok = 400 if path.endswith("steps/1") else 200  # no policy given
                await expect(ok if kind == "admin" else 403, "GET", path, f"Bearer {token}")
            for bearer in (None, "", "Bearer", "Bearer nonsense", f"Basic {server.admin}", server.admin):
                await expect(401, "GET", path, bearer)
            await expect(401, "GET", path, f"Bearer {server.admin[:-1]}")
        for token in bearers.values():
            await expect(200, "GET", "/v1/models", f"Bearer {token}")
            await expect(200, "GET", "/v1/models", f"bearer   {token}")
            await expect(200, "POST", "/v1/chat/completions", f"Bearer {token}", json=CHAT)
            await expect(200, "POST", f"/r/{token}/v1/chat/completions", None, json=CHAT)
            for path in UPSTREAM_ONLY:
                await expect(404, "GET", path, f"Bearer {token}")
                await expect(404, "POST", path, f"Bearer {token}", json={})
        await expect(401, "POST", "/v1/chat/completions", None, json=CHAT)
        await expect(401, "POST", f"/r/{'x' * 40}/v1/chat/completions", f"Bearer {server.agent}", json=CHAT)
        # a token in the path never opens the control API
        await expect(404, "GET", f"/r/{server.admin}/control/v1/status", f"Bearer {server.admin}")
        await expect(405, "GET", "/v1/chat/completions", f"Bearer {server.agent}")
        await expect(200, "GET", "/health", None)
        assert not wrong, wrong


async def test_who_has_no_key_is_told_which_file_has_it(start: Any) -> None:
    async with start() as server:
        for path, token in (("/v1/models", "agent.token"), ("/control/v1/status", "admin.token")):
            for headers, said in (({}, "a key is needed, as Authorization: Bearer KEY"), (OTHER, "not known here")):
                reply = await server.http.get(path, headers=headers)
                assert reply.status_code == 401
                message = reply.json()["error"]["message"]
                assert said in message
                assert f"key is in the file {token} of the run folder" in message
                assert str(server.folder) not in message, "who asks may be anybody"
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="sk-mine", max_retries=0) as sdk:
            with pytest.raises(openai.AuthenticationError, match=r"an app's key is in the file agent\.token"):
                await sdk.models.list()


@pytest.mark.parametrize("header", ["x-api-key", "api-key"])
async def test_a_key_may_stand_where_other_sdks_put_it(start: Any, header: str) -> None:
    async with start() as server:
        rollout, another = await server.open(), await server.open()

        async def ask(path: str = "/v1/models", **headers: str) -> httpx.Response:
            return await server.http.get(path, headers={name.replace("_", "-"): key for name, key in headers.items()})

        assert (await ask(**{header: server.agent})).status_code == 200
        assert (await ask(**{header: "sk-of-somewhere-else"})).status_code == 401
        # a key of another service beside one of ours is the app's own business
        assert (await ask(**{header: rollout.token}, **OTHER)).status_code == 200
        assert (await ask(f"/r/{rollout.token}/v1/models", **{header: "sk-mine"})).status_code == 200
        for path, beside in (("/v1/models", f"Bearer {rollout.token}"), (f"/r/{rollout.token}/v1/models", "")):
            refused = await ask(path, authorization=beside, **{header: another.token})
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "rollout_conflict")
        assert (await ask("/control/v1/status", **{header: server.admin})).status_code == 401, "control: bearer alone"
        twice = await raw(server, f"GET /v1/models HTTP/1.1\nhost: localhost\n{header}: a\n{header}: b\n\n")
        assert twice[0] == 400


async def test_each_dialect_has_its_doors_and_its_words_for_a_refusal(start: Any) -> None:
    async with start() as server:
        key = {"authorization": f"Bearer {server.agent}"}
        message = {"model": "m", "max_tokens": 5, "messages": CHAT["messages"]}
        for path, body in {
            "/openai/deployments/gpt-4o/chat/completions?api-version=2024-10-21": {"messages": CHAT["messages"]},
            "/openai/deployments/Qwen%2FQwen3/chat/completions": {"model": None, "messages": CHAT["messages"]},
            "/v1/deployments/gpt-4o/chat/completions": {"model": "other", "messages": CHAT["messages"]},
            "/openai/v1/chat/completions": CHAT,
            "/v1/messages": message,
            "/v1/responses": {"model": "m", "input": "hi"},
            "/openai/responses": {"model": "m", "input": "hi"},
        }.items():
            assert (await server.http.post(path, json=body, headers=key)).status_code == 200, path
            refused = await server.http.post(path, json=body)
            assert refused.status_code == 401
            said = refused.json()
            if path == "/v1/messages":
                assert (said["type"], said["error"]["type"]) == ("error", "authentication_error")
            else:
                assert said["error"]["code"] == "no_token"
            assert refused.headers["www-authenticate"] == "Bearer"


async def test_host_and_origin(start: Any) -> None:
    async with start() as server:
        port = server.url.rsplit(":", 1)[1]
        bearer = {"authorization": f"Bearer {server.admin}"}
        allowed = [f"127.0.0.1:{port}", f"localhost:{port}", "LOCALHOST", f"[::1]:{port}"]
        refused = [
            "evil.com",
            "127.0.0.1.evil.com",
            "a/b?c#d",
            "localhost@evil.com",
            "",
            "localhost:99999999",
            "0x7f.1",
        ]
        refused += ["127.0.0.1/control/v1/status?x=", "localhost evil.com"]
        for path in ("/control/v1/status", "/v1/models", "/health"):
            for host in allowed:
                assert (await server.http.get(path, headers={**bearer, "host": host})).status_code == 200, host
            for host in refused:
                assert (await server.http.get(path, headers={**bearer, "host": host})).status_code == 421, host
            for origin in (f"http://localhost:{port}", "http://127.0.0.1:3000"):
                assert (await server.http.get(path, headers={**bearer, "origin": origin})).status_code == 200, origin
            for origin in (
                "http://evil.com",
                "null",
                "https://localhost.evil.com",
                "http://localhost@evil.com",
                "file://",
            ):
                assert (await server.http.get(path, headers={**bearer, "origin": origin})).status_code == 403, origin


async def test_the_token_decides_the_rollout(start: Any) -> None:
    async with start() as server:
        mine, other = await server.open(), await server.open()

        async def status(token: str, *, path: str = "", **headers: str) -> int:
            url = f"{path}/v1/chat/completions"
            headers = {name.replace("_", "-"): value for name, value in headers.items()}
            sent = {"authorization": f"Bearer {token}", **headers}
            reply: httpx.Response = await server.http.post(url, json=CHAT, headers=sent)
            return reply.status_code

        assert await status(mine.token, x_art_rollout_id=mine.id) == 200
        assert await status(mine.token, x_art_rollout_id=other.id) == 400
        assert await status(server.agent, x_art_rollout_id=mine.id) == 400
        assert await status(other.token, path=f"/r/{mine.token}") == 400
        assert await status(server.agent, path=f"/r/{mine.token}") == 400
        assert await status(mine.token, path=f"/r/{mine.token}") == 200
        assert await status("sk-the-app-s-own-key", path=f"/r/{mine.token}") == 200
        assert len((await server.client.rollout(mine.id)).calls) == 3
        assert (await server.client.rollout(other.id)).calls == []


async def test_a_token_after_its_rollout_closed_is_served_and_not_attributed(start: Any) -> None:
    async with start() as server:
        await server.client.train_step(1, server.config, rollout_ids=await server.collect(1), deadline=60)
        rollout = await server.open(version=0)
        await server.chat(rollout.token)
        await server.client.close_rollout(rollout.id, reward=1.0)
        reply = await server.chat(rollout.token, "late")
        assert reply.json()["choices"][0]["message"]["content"] == "policy@1 says late", "the newest answers"
        stored = await server.client.rollout(rollout.id)
        assert [call.status for call in stored.calls] == [CallStatus.OK]
        assert (await server.client.status())["proxy"]["late"] == 1


async def test_a_token_dies_some_time_after_its_rollout(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("art_backends.server.sessions.TOKEN_SECONDS", -1.0)
    async with start() as server:
        rollout = await server.open()
        assert (await server.chat(rollout.token)).status_code == 200, "an open one's lives"
        await server.client.close_rollout(rollout.id, reward=1.0)
        refused = await server.chat(rollout.token)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "unknown_token")


async def test_a_client_cannot_choose_the_upstream(start: Any) -> None:
    async with start() as server:
        port = server.url.rsplit(":", 1)[1]
        more = {"api_base": "http://evil.com", "base_url": "http://evil.com", "api_key": "x"}
        headers = {"authorization": f"Bearer {server.agent}", "x-base-url": "http://evil.com", "forwarded": "host=evil"}
        reply = await server.http.post("/v1/chat/completions", json={**CHAT, **more}, headers=headers)
        assert reply.json()["choices"][0]["message"]["content"] == "base-model says hi"
        for target, expected in {
            "http://evil.com/v1/models": 200,
            "http://evil.com/pause": 404,
            "http://evil.com:80/control/v1/status": 403,
            "//evil.com/v1/models": 404,
            "evil.com:80": 400,
        }.items():
            status, answer = await raw(
                server,
                f"GET {target} HTTP/1.1\nHost: 127.0.0.1:{port}\n"
                f"Authorization: Bearer {server.agent}\nConnection: close\n\n",
            )
            assert status == expected, (target, answer)
            assert expected != 200 or '"policy"' in answer, "whatever address is named, it is ours"
        status, answer = await raw(
            server, "GET http://localhost/v1/models HTTP/1.1\nHost: evil.com\nConnection: close\n\n"
        )
        assert status == 421, "the header decides, not the line of the request"


FRAMINGS = [
    "Content-Length: 4\nTransfer-Encoding: chunked\n\n0\n\nGET /health HTTP/1.1\nHost: localhost\n\n",
    "Transfer-Encoding: chunked\nContent-Length: 4\n\n0\n\n",
    "Content-Length: 4\nContent-Length: 5\n\nabcd",
    "Content-Length: -1\n\nabcd",
    "Content-Length: +4\n\nabcd",
    "Transfer-Encoding: chunked\nTransfer-Encoding: identity\n\n0\n\n",
    "Transfer-Encoding: xchunked\n\n0\n\n",
    "Content-Length : 4\n\nabcd",
    "Host: evil.com\nContent-Length: 2\n\n{}",
    "Authorization: Bearer other\nContent-Length: 2\n\n{}",
    "X-Api-Key: a\nX-Api-Key: b\nContent-Length: 2\n\n{}",
    "Content-Length: 2\nTransfer-Encoding: identity\n\n{}",
    "Transfer-Encoding: chunked, identity\n\n0\n\n",
    "Transfer-Encoding: identity, chunked\nContent-Length: 2\n\n{}",
    "Content-Length: 0x2\n\n{}",
    "Content-Length: 2_0\n\n{}",
    "Content-Length: 2, 3\n\n{}",
    "Transfer-Encoding: chunked\n\n0x1\na\n0\n\n",
    "Transfer-Encoding: chunked\n\n-1\na\n0\n\n",
    "Transfer-Encoding: chunked\n\nzz\na\n0\n\n",
    "Bad Header: 1\nContent-Length: 2\n\n{}",
    " folded: 1\nContent-Length: 2\n\n{}",
]
BEHIND = "GET /health HTTP/1.1\nHost: localhost\n\n"  # what a smuggler hides behind a request


async def test_smuggled_requests_are_refused(start: Any) -> None:
    async with start() as server:
        for path, token in (("/control/v1/rollouts", server.admin), ("/v1/chat/completions", server.agent)):
            for framing in FRAMINGS:
                status, answer = await raw(
                    server, f"POST {path} HTTP/1.1\nHost: localhost\nAuthorization: Bearer {token}\n{framing}{BEHIND}"
                )  # it returns when the connection is closed, which is for the server to do
                assert status == 400, (framing, answer)
                assert answer.count("HTTP/1.1") == 1, f"a second request was read out of {framing!r}"


async def test_no_token_reaches_the_logs(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with start() as server:
        rollout = await server.open()
        secrets = [server.admin, server.agent, rollout.token]
        for path in (f"/r/{rollout.token}/v1/chat/completions", f"/r/{rollout.token}/v1/nowhere"):
            await server.http.post(path, json=CHAT)
            await server.http.post(path, content=b"no json")
        await server.http.get("/control/v1/rollouts/nobody", headers={"authorization": f"Bearer {server.admin}"})
        await server.client.close_rollout(rollout.id, reward=1.0)
        files = [path for path in server.folder.rglob("*") if path.is_file() and path.suffix != ".token"]
        written = b"".join(path.read_bytes() for path in files)
    ours = "\n".join(
        record.getMessage() for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))
    )
    for secret in secrets:
        assert secret.encode() not in written
        assert secret not in ours


def test_host_rules() -> None:
    anywhere = HostRules("0.0.0.0")
    assert all(anywhere.allows(host) for host in ("192.168.1.5:80", "localhost", "[fe80::1]:8787"))
    assert not any(anywhere.allows(host) for host in ("evil.com", "192.168.1.5.evil.com", "1.2.3"))
    named = HostRules("gpu-box")
    assert named.allows("GPU-BOX:8787")
    assert not named.allows("192.168.1.5")
    assert [
        host
        for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost", "0.0.0.0", "::", "10.0.0.1", "box", "")
        if is_loopback(host)
    ] == [
        "127.0.0.1",
        "127.8.8.8",
        "::1",
        "localhost",
    ]


async def test_a_request_that_outlived_its_scope_is_served_for_no_rollout(start: Any) -> None:
    """Capture marks what a thread or timer sends after its rollout's scope: the rollout may still be open then."""
    async with start() as server:
        rollout = await server.open()
        mark = {"x-art-scope-ended": "1"}
        bearer = {"authorization": f"Bearer {rollout.token}"}
        ways = [("/v1/chat/completions", bearer | mark), (f"/r/{rollout.token}/v1/chat/completions", mark)]
        for path, headers in ways:
            assert (await server.http.post(path, json=CHAT, headers=headers)).status_code == 200
        assert (await server.http.post(ways[0][0], json=CHAT, headers=bearer)).status_code == 200
        found = await server.client.rollout(rollout.id)
        assert [call.sequence for call in found.calls] == [0]  # the one without the mark
        # no key to more than the rollout's token opens, and none without a token
        assert (await server.http.get("/control/v1/status", headers=bearer | mark)).status_code == 403
        assert (await server.http.post("/v1/chat/completions", json=CHAT, headers=mark)).status_code == 401
        named = bearer | mark | {"x-art-rollout-id": "another"}
        assert (await server.http.post("/v1/chat/completions", json=CHAT, headers=named)).status_code == 400
