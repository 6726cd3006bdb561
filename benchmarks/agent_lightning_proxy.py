"""Agent Lightning's proxy for ``benchmarks/proxy.py``; run by the interpreter of an environment that has it.

    PYTHON benchmarks/agent_lightning_proxy.py --port N --upstream URL

One rollout is begun, and its calls are recorded in that project's own store in memory, with its usual callbacks. The
first line on standard output is JSON with the path below which the model ``m`` is asked. It imports nothing of ours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
os.environ.setdefault("LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY", "true")  # what it is built on asks for one
OUTPUT = os.dup(1)  # the ready line's alone: libraries greet on standard output
os.dup2(2, 1)

import agentlightning as agl  # type: ignore[import-not-found]  # noqa: E402  # in an environment of its own


async def serve(port: int, upstream: str) -> None:
    store = agl.InMemoryLightningStore()
    params = {"model": "hosted_vllm/base", "api_base": f"{upstream}/v1", "api_key": "none"}
    proxy = agl.LLMProxy(
        port=port,
        host="127.0.0.1",
        model_list=[{"model_name": "m", "litellm_params": params}],
        store=agl.LightningStoreThreaded(store),
        launch_mode="thread",
    )
    rollout = await store.start_rollout(input={"question": "none"})
    await proxy.start()
    path = f"/rollout/{rollout.rollout_id}/attempt/{rollout.attempt.attempt_id}"
    os.write(OUTPUT, json.dumps({"ready": True, "path": path}).encode() + b"\n")
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--upstream", required=True)
    options = parser.parse_args()
    asyncio.run(serve(options.port, options.upstream))


if __name__ == "__main__":
    main()
