"""The vocabulary of the project as plain data.

Scenario, Call, Rollout, Trajectory, TrajectoryGroup: what the proxy records, the store keeps, the control API
carries and the trainer reads. Everything here is a frozen pydantic model that round-trips through JSON.

It refuses to hold behaviour: nothing here opens files, talks to a server or knows torch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

JSON = Any  # any value that json.dumps accepts


class Record(BaseModel):
    """Base of all records: immutable, and a field that is not known is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class CaptureLevel(StrEnum):
    """What an engine gives back about a call; only TOKENS trains."""

    TOKENS = "tokens"  # token ids and logprobs
    IDS = "ids"  # token ids only
    TEXT = "text"  # neither


class CallStatus(StrEnum):
    OPEN = "open"  # the intent is written, the outcome is not (yet)
    OK = "ok"
    ERROR = "error"  # the engine answered with an error
    CANCELLED = "cancelled"  # the client went away


class Purpose(StrEnum):
    TRAIN = "train"
    EVAL = "eval"
    TRAFFIC = "traffic"  # calls of an app that no run opened a rollout for


class PromptMode(StrEnum):
    """How the prompt of a call came to be."""

    RENDERED = "rendered"  # the engine's chat template rendered the messages
    EXACT = "exact"  # the ids of an earlier call verbatim, plus a tail


class Sampling(Record):
    """The sampling parameters in force for a call (not merely those that were asked for)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    seed: int | None = None
    max_tokens: int | None = None
    constrained: bool = False  # a grammar was in force: logprobs are renormalised and do not train


class Choice(Record):
    """One sampled answer of a call.

    ``token_ids`` and ``logprobs`` have the same length: every sampled token, the end-of-turn token included if it
    was sampled; ``logprobs`` are natural logarithms under the sampler's distribution.
    """

    index: int = 0
    message: dict[str, JSON] = Field(default_factory=dict)
    finish_reason: str | None = None
    token_ids: list[int] = Field(default_factory=list)
    logprobs: list[float] = Field(default_factory=list)


class Node(Record):
    """Where in the agent's program a call came from. All fields are what the framework said, or None."""

    name: str | None = None
    step: int | None = None
    checkpoint_ns: str | None = None
    task_id: str | None = None
    node_run_id: str | None = None  # of one run of the node for its task; a node that is run again has another one
    run_id: str | None = None  # LangChain's run id of the model call
    agent: str | None = None  # name of the agent, where it has one

    @property
    def path(self) -> list[str]:
        """Names from the outermost node inwards: ``["team", "model"]`` for node ``model`` of a subgraph ``team``."""
        names = [part.partition(":")[0] for part in (self.checkpoint_ns or "").split("|") if part]
        return names or ([self.name] if self.name else [])

    def within(self, names: Collection[str]) -> bool:
        """Whether the node, one that it stands in, or its agent is among ``names`` (empty: every node);
        ``outer/inner`` names a node within another."""
        if not names:
            return True
        path = self.path
        runs = {"/".join(path[begin:end]) for end in range(1, len(path) + 1) for begin in range(end)}
        return not runs.isdisjoint(names) or self.agent in names


class Call(Record):
    """One model request and its outcome."""

    id: str
    rollout_id: str | None = None
    sequence: int = 0  # order of arrival within the rollout, from 0
    status: CallStatus = CallStatus.OPEN
    model: str = ""  # the name that the app asked for
    version: str | None = None  # adapter version that answered, "NAME@N"; N = 0 is the base model
    node: Node = Field(default_factory=Node)
    request: dict[str, JSON] = Field(default_factory=dict)  # body as the app sent it
    prompt_token_ids: list[int] = Field(default_factory=list)
    choices: list[Choice] = Field(default_factory=list)
    sampling: Sampling = Field(default_factory=Sampling)
    capture: CaptureLevel = CaptureLevel.TEXT
    prompt_mode: PromptMode = PromptMode.RENDERED
    continues: str | None = None  # id of the call whose tokens this prompt begins with
    drifted: bool = False  # it continues an earlier call, but its tokens could not be kept
    broken_control_tokens: int = 0  # strings in the data that spelled control tokens and were broken up
    retry: int = 0  # the SDK's own retry count of this request
    excluded: str | None = None  # why it must not train, in a word: "retry", "rerun", "cancelled", "constrained", …
    error: str | None = None
    started: float = 0.0  # seconds since the epoch
    finished: float | None = None


def version_name(policy: str, version: int) -> str:
    """``NAME@N``."""
    return f"{policy}@{version}"


def version_number(policy: str, name: str) -> int | None:
    """N of ``NAME@N`` of this policy, else None."""
    head, _, number = name.rpartition("@")
    return int(number) if head == policy and number.isascii() and number.isdecimal() else None


class RolloutError(Record):
    """What the agent did wrong: an exception's type and text. It goes to the reward function and trains."""

    type: str
    message: str
    traceback: str | None = None


class Rollout(Record):
    """One run of the agent on one scenario."""

    id: str
    policy: str
    version: str  # the adapter version it is pinned to
    purpose: Purpose = Purpose.TRAIN
    scenario_id: str = ""
    scenario: JSON = None
    step: int | None = None  # the training step (1-based) it is collected for; for EVAL: the step it measures
    group: str = ""  # rollouts with the same (step, group) form one group
    sample: int = 0  # which of the group's rollouts
    closed: bool = False
    output: JSON = None  # the agent's final state, as JSON
    reward: float | None = None
    metrics: dict[str, float] = Field(default_factory=dict)  # named parts of the reward and whatever else is counted
    scored_by: str | None = None  # identity of the reward; of another reward's runs no figure is made
    error: RolloutError | None = None
    fault: str | None = None  # what the world did wrong; such a rollout is excluded from training
    subject: str | None = None  # SHA-256 of whom it is about, hexadecimal
    opened: float = 0.0
    finished: float | None = None
    calls: list[Call] = Field(default_factory=list)


class Trajectory(Record):
    """A closed, scored rollout as training sees it."""

    rollout_id: str
    reward: float
    node_rewards: dict[str, float] = Field(default_factory=dict)  # for the calls of single nodes, instead of reward
    calls: list[Call]


NODE_PART = "node/"  # a part of a reward so named is the reward of the node whose name follows


class TrajectoryGroup(Record):
    """The trajectories of one scenario within one step; advantages come from the group."""

    group: str
    trajectories: list[Trajectory]


SPREAD = 1e-6  # rewards that differ by less say nothing


def has_spread(rewards: Sequence[float]) -> bool:
    """Whether a group with these rewards can be learned from."""
    return len(rewards) > 1 and max(rewards) - min(rewards) >= SPREAD


def trajectory(rollout: Rollout) -> Trajectory | None:
    """The rollout as training sees it, or None if it is open, faulty or has no reward."""
    if not rollout.closed or rollout.fault is not None or rollout.reward is None:
        return None
    nodes = {
        name.removeprefix(NODE_PART): value for name, value in rollout.metrics.items() if name.startswith(NODE_PART)
    }
    return Trajectory(rollout_id=rollout.id, reward=rollout.reward, node_rewards=nodes, calls=rollout.calls)
