"""The control interface in memory, a display that remembers, and a small run: for tests of the loop and its helpers.

MemoryServer stands in for the server only to inject what a real one does rarely; whole runs against the real one are
in tests/e2e.
"""

import itertools
import json
from collections import Counter

from art_backends.client import OpenRollout, StepOutcome, StepProgress
from art_backends.config import TrainConfig
from art_backends.display import StepLine
from art_backends.errors import ControlError
from art_backends.loop import run
from art_backends.scenarios import Scenario
from art_backends.trajectories import Call, CallStatus, Choice, Node, Purpose, Rollout, Sampling


def a_call(rollout_id, *, constrained=False):
    return Call(
        id=f"call-{rollout_id}",
        rollout_id=rollout_id,
        status=CallStatus.OK,
        node=Node(name="model", checkpoint_ns="agent:1|model:2"),
        sampling=Sampling(constrained=constrained),
        choices=[Choice(token_ids=[1], logprobs=[-0.5])],
    )


class MemoryServer:
    """What the loop needs of a server. ``outcomes``: errors or kinds by step; ``fail``: errors by method name."""

    def __init__(self, name="policy", constrained=False, calls=True):
        self.name = name
        self.constrained = constrained
        self.calls = calls
        self.version = 0
        self.step = 0
        self.store: dict[str, Rollout] = {}
        self.recorded: dict[int, dict] = {}
        self.trained: dict[int, list[str]] = {}
        self.fail: dict[str, list[Exception]] = {}
        self.opened = Counter()
        self.training = None  # awaited while a step trains
        self.ids = itertools.count(1)

    def _maybe_fail(self, method):
        if self.fail.get(method):
            raise self.fail[method].pop(0)

    async def status(self):
        self._maybe_fail("status")
        policy = {"name": self.name, "version": self.version, "step": self.step, "digest": "sha256:abc"}
        return {"policies": [policy], "rollouts": {"drifted": 0}, "engine": {"tokens_sampled": 5, "busy_seconds": 1}}

    async def open_rollout(self, *, policy, purpose, scenario_id, scenario, step, group, sample, version):
        self._maybe_fail("open_rollout")
        id = f"r{next(self.ids)}"
        self.opened[Purpose(purpose), step] += 1
        pinned = f"{policy}@{self.version if version is None else version}"
        self.store[id] = Rollout(
            id=id, policy=policy, version=pinned, purpose=purpose, scenario_id=scenario_id, scenario=scenario,
            step=step, group=group, sample=sample, opened=float(len(self.store)),
        )  # fmt: skip
        return OpenRollout(id=id, token=f"token-{id}", version=pinned, base_url="http://127.0.0.1:9/v1")

    async def close_rollout(
        self, rollout_id, *, output=None, reward=None, metrics=None, scored_by=None, error=None, fault=None
    ):
        self._maybe_fail("close_rollout")
        rollout = self.store[rollout_id]
        if rollout.closed:
            raise ControlError("closed already", 409, "conflict")
        self.store[rollout_id] = rollout.model_copy(
            update={
                "closed": True, "output": output, "reward": reward, "metrics": dict(metrics or {}), "error": error,
                "scored_by": scored_by,
                "fault": fault, "finished": rollout.opened + 1,
            }
        )  # fmt: skip
        return self.store[rollout_id]

    async def rollout(self, rollout_id):
        self._maybe_fail("rollout")
        calls = [a_call(rollout_id, constrained=self.constrained)] if self.calls else []
        return self.store[rollout_id].model_copy(update={"calls": calls})

    async def rollouts(self, *, policy=None, step=None, purpose=None, closed=None, limit=None, after=None):
        found = [
            rollout
            for rollout in self.store.values()
            if rollout.step == step and rollout.purpose == purpose and rollout.closed == closed
        ]
        ids = [rollout.id for rollout in found]
        return found[ids.index(after) + 1 if after else 0 :][:limit]

    async def steps(self, policy):
        return [{"step": step, **outcome} for step, outcome in self.recorded.items()]

    async def train_step(self, step, config, *, rollout_ids=None, progress=None, deadline=None):
        self._maybe_fail("train_step")
        if step not in self.recorded:
            groups: dict[str, set] = {}
            for id in rollout_ids:
                groups.setdefault(self.store[id].group, set()).add(self.store[id].reward)
            spread = any(len(rewards) > 1 for rewards in groups.values())
            if self.training is not None:
                await self.training(step)
            self.trained[step] = list(rollout_ids)
            self.version += spread
            self.step = step
            kind = "committed" if spread else "skipped"
            self.recorded[step] = {
                "kind": kind,
                "version": self.version,
                "reason": None if spread else "no group has a spread of rewards",
                "metrics": {
                    "loss": 0.1,
                    "tokens/trained": 10,
                    "tokens/computed": 24,
                    "tokens/unique": 20,
                    "sampling/sampling_logp_difference/mean": 1e-5,
                    "sampling/sampling_logp_difference/max": 1e-4,
                },
            }
        progress(StepProgress(packs_done=1, packs=1))
        return StepOutcome(**self.recorded[step])


class Notes:
    """A display that remembers."""

    def __init__(self):
        self.lines: list[str] = []
        self.steps: list[StepLine] = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def phase(self, name, total):
        self.lines.append(f"phase {name} {total}")

    def advance(self, done):
        pass

    def step(self, line):
        self.steps.append(line)

    def speed(self, tokens_per_second):
        pass

    def note(self, text):
        self.lines.append(text)

    def warn(self, text):
        self.lines.append(f"warning: {text}")

    @property
    def text(self):
        return "\n".join(self.lines)


SCENARIOS = [Scenario(f"s{index}", {"id": f"s{index}", "n": index}) for index in range(6)]
HELD_OUT = [Scenario(f"h{index}", {"id": f"h{index}", "n": index}) for index in range(3)]


async def echo(scenario):
    return {"n": scenario["n"]}


def alternating():
    """A reward with a spread in every group: 0, 1, 0, 1, …"""
    turn = itertools.count()
    return lambda run: {"reward": next(turn) % 2, "success": 1.0}


def a_config(folder, **settings):
    fixed = {"folder": folder, "steps": 2, "groups_per_step": 2, "group_size": 2}
    return TrainConfig(**{**fixed, **settings})


async def go(server, folder, *, reward=None, agent=echo, display=None, held_out=HELD_OUT, success=None, sinks=(), **s):
    return await run(
        client=server,
        config=a_config(folder, **s),
        scenarios=SCENARIOS,
        held_out=held_out,
        run_agent=agent,
        reward=reward or alternating(),
        display=display or Notes(),
        success=success,
        sinks=sinks,
    )


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
