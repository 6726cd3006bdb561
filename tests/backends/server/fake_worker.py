"""A worker that can be told to fail: speaks the engine protocol and the job API, computes nothing.

Run as the supervisor's child: ``python fake_worker.py --versions DIR --faults DIR --uds SOCKET``. A fault is a file in
the folder of faults, taken (removed) when it strikes, so that it survives the worker's death but strikes once; its
text, if any, is the number of times. ``hold_*`` faults wait until ``POST /test/release/NAME``;
``GET /test/held/NAME`` answers when one waits.

With ``--as-vllm`` it stands for a vLLM server: it outlives its standard input, takes options that it does not know,
sleeps and wakes, and notes in ``events.log`` what it was asked; ``place.json`` says where it listens.
"""

import argparse
import asyncio
import json
import os
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
from art_backends.training import versions
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

BASE = "base-model"
DIGEST, LONGEST = "digest-1", 4096


class Fake:
    def __init__(self, options: argparse.Namespace) -> None:
        self.versions: Path = options.versions
        self.faults: Path = options.faults
        self.loaded: dict[str, str] = {}
        self.held: dict[str, asyncio.Event] = {}
        self.released: dict[str, asyncio.Event] = {}
        self.jobs: dict[str, dict[str, Any]] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.calls = 0
        self.renders = getattr(options, "renders", "")

    def note(self, event: str) -> None:
        with (self.faults / "events.log").open("a") as file:
            file.write(event + "\n")

    def takes(self, fault: str) -> bool:
        file = self.faults / fault
        if not file.exists():
            return False
        left = int(file.read_text() or "1") - 1
        file.write_text(str(left)) if left else file.unlink()
        return True

    async def hold(self, name: str) -> None:
        if self.takes(f"hold_{name}"):
            self.held.setdefault(name, asyncio.Event()).set()
            await self.released.setdefault(name, asyncio.Event()).wait()

    def die(self) -> None:
        os._exit(9)

    async def test_held(self, request: Request) -> Response:
        await self.held.setdefault(request.path_params["name"], asyncio.Event()).wait()
        return JSONResponse({})

    async def test_release(self, request: Request) -> Response:
        self.released.setdefault(request.path_params["name"], asyncio.Event()).set()
        return JSONResponse({})

    async def models(self, _: Request) -> Response:
        data: list[dict[str, Any]] = [{"id": BASE, "object": "model", "parent": None, "max_model_len": LONGEST}]
        data += [{"id": name, "object": "model", "parent": BASE} for name in self.loaded]
        return JSONResponse({"data": data})

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        model = body["model"]
        if model != BASE and model not in self.loaded:
            return refused(404, f"The model `{model}` does not exist.", "model_not_found")
        self.calls += 1
        self.note(f"chat {model} {body['messages'][-1].get('content')}")
        exact = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        prompt = exact or render(body["messages"])
        if body["messages"][-1].get("content") == "hold" and not body.get("stream"):
            await self.hold("call")
            self.note("held call ends")
        text = f"{model} says {body['messages'][-1].get('content')}"
        tokens = [*text.encode()[: body.get("max_tokens") or 10_000], 0]
        logprob = float("nan") if self.takes("nan_logprobs") else -0.25
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": "stop",
            "token_ids": tokens,
            "logprobs": {"content": [{"token": f"token_id:{t}", "logprob": logprob, "bytes": []} for t in tokens]},
        }
        if (self.faults / "text_only").exists():
            del choice["token_ids"], choice["logprobs"]
        reply = {
            "id": f"chat-{self.calls}",
            "object": "chat.completion",
            "created": 0,
            "model": model,
            "choices": [choice],
            "prompt_token_ids": prompt,
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(tokens), "total_tokens": 0},
        }
        if body.get("stream"):
            return StreamingResponse(self.stream(reply, body), media_type="text/event-stream")
        return Response(json.dumps(reply), media_type="application/json")

    async def stream(self, reply: dict[str, Any], body: dict[str, Any]) -> AsyncIterator[str]:
        """The reply in two chunks; "hold" waits between them."""
        (choice,) = reply.pop("choices")
        text, ids, told = choice["message"]["content"], choice["token_ids"], choice["logprobs"]["content"]
        for last in (False, True):
            more = {"content": text[1:]} if last else {"content": text[:1], "role": "assistant"}
            here = slice(1, None) if last else slice(0, 1)
            one = {"index": 0, "delta": more, "token_ids": ids[here], "logprobs": {"content": told[here]}}
            part = {**reply, "choices": [{**one, "finish_reason": "stop" if last else None}]}
            if not last:
                part.pop("usage")
            yield f"data: {json.dumps(part)}\n\n"
            if not last and body["messages"][-1].get("content") == "hold":
                await self.hold("call")
        yield "data: [DONE]\n\n"

    async def tokenize(self, request: Request) -> Response:
        body = await request.json()
        if "messages" in body:
            tokens = render(body["messages"], body.get("add_generation_prompt", True))
        else:
            tokens = list(body["prompt"].encode())
        if ("text" if "prompt" in body else "messages") == self.renders:
            tokens = [*tokens, 1]
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": 4096})

    async def detokenize(self, request: Request) -> Response:
        return JSONResponse({"prompt": bytes((await request.json())["tokens"]).decode(errors="replace")})

    async def tokenizer_info(self, _: Request) -> Response:
        return JSONResponse({"special_tokens": [], "eos_token_ids": [0]})

    async def load(self, request: Request) -> Response:
        body = await request.json()
        if self.takes("die_at_load"):
            self.die()
        if self.takes("refuse_load"):
            return refused(400, "the adapter's rank is 9, not 8", "invalid_adapter")
        if body["lora_name"] in self.loaded:
            return refused(400, f"{body['lora_name']} is loaded already", "duplicate")
        self.loaded[body["lora_name"]] = body["lora_path"]
        return Response("loaded")

    async def unload(self, request: Request) -> Response:
        name = (await request.json())["lora_name"]
        if self.loaded.pop(name, None) is None:
            return refused(404, f"{name} is not loaded", "not_found")
        return Response("unloaded")

    async def sleep(self, request: Request) -> Response:
        if self.takes("refuse_sleep"):
            return refused(404, "Not Found", "not_found")
        self.note(f"sleep {request.url.query}")
        return JSONResponse({"status": "sleeping"})

    async def wake(self, _: Request) -> Response:
        if self.takes("refuse_wake"):
            return refused(500, "CUDA error: out of memory", "internal_error")
        self.note("wake")
        return JSONResponse({"status": "awake"})

    async def metrics(self, _: Request) -> Response:
        return JSONResponse({"tokens_sampled": self.calls, "busy_seconds": 0.5, "running": 0, "waiting": 0})

    async def train(self, request: Request) -> Response:
        body = await request.json()
        name = f"{body['policy']}@{body['from_version']}.{body['step']}"
        if name not in self.jobs or self.jobs[name]["state"] != "running":
            self.jobs[name] = report("running")
            task = asyncio.get_running_loop().create_task(self.run(name, body))
            self.tasks.add(task)
        return JSONResponse({"job": name}, 202)

    async def run(self, name: str, body: dict[str, Any]) -> None:
        with (self.faults / "jobs.log").open("a") as file:
            file.write(f"{os.getpid()} {name}\n")
        ids = sorted(item["rollout_id"] for group in body["groups"] for item in group["trajectories"])
        version = body["from_version"] + 1
        final = Path(body["versions"]) / f"{body['policy']}@{version}"
        await self.hold("job")
        if self.takes("die_before_commit"):
            self.die()
        if self.takes("fail_job"):
            self.jobs[name] = {**report("failed"), "error": {"type": "NonFiniteError", "message": "loss was NaN"}}
            return
        if self.takes("skip"):
            outcome = {"kind": "skipped", "version": version - 1, "reason": "no_spread", "metrics": {}, "tokens": {}}
            self.jobs[name] = {**report("done"), "outcome": outcome}
            return
        if versions.read_version(final.parent, body["policy"], version) is None:
            state = {
                "format": 1,
                "policy": body["policy"],
                "version": version,
                "step": body["step"],
                "rollout_ids": ids,
                "metrics": {"loss": 0.5},
                "base_digest": "digest-1",
            }
            with versions.new_version(final.parent, body["policy"], version) as place:
                versions.write_file(place / versions.STATE, versions.encode_json(state))
        if self.takes("die_after_commit"):
            self.die()
        tokens = {
            trajectory["rollout_id"]: [
                {"call": call["id"], "choice": 0, "trained": 3, "advantage": 0.5, "excluded": None}
                for call in trajectory["calls"]
            ]
            for group in body["groups"]
            for trajectory in group["trajectories"]
        }
        outcome = {"kind": "committed", "version": version, "reason": None, "metrics": {"loss": 0.5}, "tokens": tokens}
        self.jobs[name] = {**report("done"), "outcome": outcome}

    async def job(self, request: Request) -> Response:
        job = self.jobs.get(request.path_params["job"])
        if job is None:
            return refused(404, "no such job", "no_such_job")
        if job["state"] == "running":
            await asyncio.wait(self.tasks, timeout=float(request.query_params.get("wait", "0")))
        return JSONResponse(self.jobs[request.path_params["job"]])

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self.models),
                Route("/metrics.json", self.metrics),
                Route("/v1/models", self.models),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/detokenize", self.detokenize, methods=["POST"]),
                Route("/tokenizer_info", self.tokenizer_info),
                Route("/v1/load_lora_adapter", self.load, methods=["POST"]),
                Route("/v1/unload_lora_adapter", self.unload, methods=["POST"]),
                Route("/sleep", self.sleep, methods=["POST"]),
                Route("/wake_up", self.wake, methods=["POST"]),
                Route("/train", self.train, methods=["POST"]),
                Route("/train/{job}", self.job),
                Route("/test/held/{name}", self.test_held),
                Route("/test/release/{name}", self.test_release, methods=["POST"]),
            ]
        )


def render(messages: list[dict[str, Any]], generate: bool = True) -> list[int]:
    text = "".join(f"<{message['role']}>{message.get('content')}\x00" for message in messages)
    return list((text + ("<assistant>" if generate else "")).encode())


def report(state: str) -> dict[str, Any]:
    return {"state": state, "progress": {"packs_done": 0, "packs": 1}, "outcome": None, "error": None}


def refused(status: int, message: str, code: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error", "code": code}}, status)


def exit_with_parent() -> None:
    while sys.stdin.buffer.read(1):
        pass
    os._exit(0)


class Server(uvicorn.Server):
    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        said = {"ready": True, "digest": DIGEST, "max_model_len": 4096, "model": "/no/model"}
        said |= {"chat_template": "{{ messages }}<tool_call>", "own_template": False}
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--uds")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--versions", type=Path, default=Path())
    parser.add_argument("--faults", type=Path, required=True)
    parser.add_argument("--digest", default="digest-1")
    parser.add_argument("--as-vllm", action="store_true")
    parser.add_argument("--renders", default="", help="text, or messages: what it turns into other tokens")
    parser.add_argument("--max-model-len", type=int, default=4096)
    given, others = parser.parse_known_args()
    DIGEST, LONGEST = given.digest, given.max_model_len
    if given.as_vllm:
        here = {"pid": os.getpid(), "uds": given.uds, "options": others}
        here["variables"] = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
        (given.faults / "place.json").write_text(json.dumps(here))
    else:
        threading.Thread(target=exit_with_parent, daemon=True).start()
    where: dict[str, Any] = {"uds": given.uds} if given.uds else {"port": given.port}
    Server(
        uvicorn.Config(Fake(given).app(), **where, log_level="warning", lifespan="off", timeout_keep_alive=120)
    ).run()
