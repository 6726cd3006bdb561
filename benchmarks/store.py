"""How the store grows and answers: bytes against content, memory and query times over many rollouts.

    python benchmarks/store.py [--json FILE] [--quick] [--turns 50] [--rollouts 10000] [--folder DIR]

1. Rollouts of ``--turns`` turns whose agent sends its whole history each time. Compared with their distinct content
   (each message and each token once) and with the naive baseline: every request and every prompt written whole, as
   JSON and int32.
2. ``--rollouts`` short rollouts (3 turns): resident memory on the way, calls per second, and the milliseconds of the
   queries that the server makes (one rollout, one step's page), median of 50.

It measures this machine's disk as well: give ``--folder`` to choose which. ``--quick`` is 500 rollouts.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from art_backends.store import Store
from art_backends.trajectories import Call, CallStatus, CaptureLevel, Choice, Purpose, Rollout

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"look_up_{n}",
            "description": "Finds what is known of a thing by its name.",
            "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
        },
    }
    for n in range(6)
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--quick", action="store_true", help="500 rollouts")
    parser.add_argument("--turns", type=int, default=50, help="turns of a long rollout (default: 50)")
    parser.add_argument("--rollouts", type=int, default=10_000, help="short rollouts (default: 10000)")
    parser.add_argument(
        "--folder", type=Path, help="where the stores are made (default: the system's temporary folder)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        result = {
            "long": long_rollouts(Path(name), options.turns),
            "many": many_rollouts(Path(name), 500 if options.quick else options.rollouts),
        }
    one, many = result["long"], result["many"]
    print(
        f"{options.turns} turns: {one['bytes_per_rollout'] / 1e3:.1f} kB a rollout, "
        f"{one['bytes_to_content']:.2f} × content,"
    )
    print(f"  {one['naive_to_bytes']:.1f} × smaller than written whole")
    print(
        f"{many['rollouts']} rollouts: {many['calls_per_second']:.0f} calls/s, memory {many['resident_mb'][0]:.0f} MB"
    )
    print(f"  after a tenth, {many['resident_mb'][-1]:.0f} MB at the end; one rollout {many['rollout_ms']:.2f} ms,")
    print(f"  a step's page {many['step_ms']:.2f} ms")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def conversation(turns: int, seed: int) -> list[Call]:
    """The calls of one rollout: each sends all that was said before, and its prompt goes on exactly."""
    draw = random.Random(seed)

    def words(count: int) -> str:
        return " ".join(f"{draw.getrandbits(24):x}" for _ in range(count))

    messages: list[dict[str, Any]] = [{"role": "system", "content": words(60)}]
    ids = [draw.randrange(50_000) for _ in range(300)]
    calls = []
    for number in range(turns):
        messages = [*messages, {"role": "user", "content": words(20)}]
        ids = [*ids, *(draw.randrange(50_000) for _ in range(40))]
        sampled = [draw.randrange(50_000) for _ in range(40)]
        answer = {"role": "assistant", "content": words(20)}
        calls.append(
            Call(
                id=f"{seed}-{number}",
                rollout_id=f"r{seed}",
                sequence=number,
                status=CallStatus.OK,
                model="gpt-4o-mini",
                version="policy@0",
                capture=CaptureLevel.TOKENS,
                request={"model": "gpt-4o-mini", "messages": messages, "tools": TOOLS, "temperature": 0.7},
                prompt_token_ids=ids,
                choices=[Choice(message=answer, token_ids=sampled, logprobs=[-0.5] * 40, finish_reason="stop")],
                continues=f"{seed}-{number - 1}" if number else None,
            )
        )
        messages, ids = [*messages, answer], [*ids, *sampled]
    return calls


def write(store: Store, seed: int, calls: list[Call], step: int = 1) -> None:
    store.open_rollout(
        Rollout(
            id=f"r{seed}", policy="policy", version="policy@0", step=step, group=f"g{seed // 8}", opened=time.time()
        )
    )
    for call in calls:
        store.begin_call(call.model_copy(update={"status": CallStatus.OPEN, "choices": []}))
        store.finish_call(call)
    store.close_rollout(f"r{seed}", reward=0.5)


def long_rollouts(folder: Path, turns: int, count: int = 20) -> dict[str, float]:
    rollouts = [conversation(turns, seed) for seed in range(count)]
    store = Store.open(folder / "long.sqlite")
    for seed, calls in enumerate(rollouts):
        write(store, seed, calls)
    store.close()
    size = (folder / "long.sqlite").stat().st_size / count
    content = statistics.fmean(map(content_bytes, rollouts))
    naive = statistics.fmean(
        sum(len(json.dumps(c.request)) + 4 * (len(c.prompt_token_ids) + 2 * 40) for c in calls) for calls in rollouts
    )
    return {
        "turns": turns,
        "bytes_per_rollout": size,
        "content_bytes": content,
        "bytes_to_content": size / content,
        "naive_bytes": naive,
        "naive_to_bytes": naive / size,
    }


def content_bytes(calls: list[Call]) -> int:
    """Each message once as JSON, each token once as int32, each logprob as float32, the tools once."""
    messages = {json.dumps(m) for m in calls[-1].request["messages"]} | {json.dumps(calls[-1].choices[0].message)}
    tokens = len(calls[-1].prompt_token_ids) + 40
    return sum(map(len, messages)) + len(json.dumps(TOOLS)) + 4 * tokens + 4 * 40 * len(calls)


def many_rollouts(folder: Path, count: int) -> dict[str, Any]:
    store = Store.open(folder / "many.sqlite")
    resident, busy = [], 0.0
    for seed in range(count):
        calls = conversation(3, seed)
        begun = time.perf_counter()
        write(store, seed, calls, step=1 + seed // 32)
        busy += time.perf_counter() - begun
        if (seed + 1) % max(1, count // 10) == 0:
            resident.append(resident_mb())
    steps = 1 + (count - 1) // 32
    draw = random.Random(1)
    one = median_ms(lambda: store.rollout(f"r{draw.randrange(count)}"))
    page = median_ms(lambda: store.rollouts(policy="policy", step=draw.randint(1, steps), purpose=Purpose.TRAIN))
    store.close()
    return {
        "rollouts": count,
        "calls_per_second": 3 * count / busy,
        "resident_mb": resident,
        "rollout_ms": one,
        "step_ms": page,
        "file_mb": (folder / "many.sqlite").stat().st_size / 1e6,
    }


def median_ms(query: Any, times: int = 50) -> float:
    taken = []
    for _ in range(times):
        begun = time.perf_counter()
        query()
        taken.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(taken)


def resident_mb() -> float:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return float("nan")
    return pages * 4096 / 1e6


if __name__ == "__main__":
    raise SystemExit(main())
