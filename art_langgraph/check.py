"""One scenario, run and captured, and what of it would be trained: ``art-langgraph check``.

The rollout is opened as one of a training step would be (same sampling, same prompts), in a run folder of its own, and
closed without a reward: it never trains. It refuses to judge the agent; it shows what the proxy saw.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from art_backends.backend import LocalServer
from art_backends.capture.scope import outside_requests, rollout_scope
from art_backends.client import Client
from art_backends.config import TrainConfig
from art_backends.display import Display
from art_backends.errors import ScenarioError
from art_backends.exclusion import exclusion
from art_backends.failures import brief
from art_backends.scenarios import Scenario
from art_backends.trajectories import Call, Purpose, Rollout
from art_backends.waiting import OverdueError, bounded

from art_langgraph.capturing import capturing
from art_langgraph.graphs import INTERRUPT, MakeInput, OnInterrupt, load_graph, run_graph
from art_langgraph.names import before_a_run


@dataclass(frozen=True)
class Checked:
    """A rollout with its calls, how it ended (None: well), and what was counted on the agent's side, with details."""

    rollout: Rollout
    ended: str | None
    counts: dict[str, int]
    details: dict[str, dict[str, int]]
    outside: int  # requests of the SDK made meanwhile by code that belongs to no rollout
    nodes: list[str]  # of the configuration: those that would train
    waits: bool = False  # it ended at an interrupt that nobody answers


async def check(
    graph: Any,
    scenario: Scenario,
    config: TrainConfig,
    *,
    display: Display,
    to_input: MakeInput | None = None,
    on_interrupt: OnInterrupt | None = None,
) -> Checked:
    """Run the graph on one scenario against a server on ``config.folder``. Raises ArtError."""
    async with load_graph(graph) as loaded:
        for warning in before_a_run(loaded.graph, config.models, config.nodes):
            display.warn(warning)
        display.note(f"loading {config.base_model}…")
        async with LocalServer(config) as server:
            with capturing() as told:
                if told:
                    display.warn(told)
                display.note(f"running scenario {scenario.id}…")
                agent = partial(run_graph, loaded, to_input=to_input, on_interrupt=on_interrupt)
                return await _run(agent, scenario, config, server.client)


async def _run(
    agent: Callable[[Any], Coroutine[Any, Any, Any]], scenario: Scenario, config: TrainConfig, client: Client
) -> Checked:
    before = outside_requests()
    opened = await client.open_rollout(
        policy=config.name, purpose=Purpose.TRAIN, scenario_id=scenario.id, scenario=scenario.data, group="check"
    )
    ended, state = None, None
    with rollout_scope(opened.base_url, opened.token, opened.id, config.models) as scope:
        try:
            state = await bounded(agent(dict(scenario.data)), config.rollout_timeout)
        except OverdueError:
            ended = f"the agent did not end within {config.rollout_timeout:g} s (rollout_timeout)"
        except asyncio.CancelledError:
            await client.close_rollout(opened.id, fault="interrupted")
            raise
        except ScenarioError as error:  # the user's to mend, and none of the agent's
            await client.close_rollout(opened.id, fault=f"setup: {error}")
            raise
        except Exception as error:  # boundary: what the agent raises is part of the result  # noqa: BLE001
            ended = brief(error)
    await client.close_rollout(opened.id, fault="check")
    rollout = await client.rollout(opened.id)
    waits = isinstance(state, Mapping) and bool(state.get(INTERRUPT))
    outside = outside_requests() - before
    return Checked(rollout, ended, scope.counts, scope.details, outside, config.nodes, waits)


def lines(checked: Checked) -> Iterator[str]:
    """The result as text: the tree of calls, the sums, and what went elsewhere."""
    calls = checked.rollout.calls
    yield f"scenario {checked.rollout.scenario_id}: {_many(len(calls), 'call')}"
    if checked.ended is not None:
        yield f"the agent failed: {checked.ended}"
    if checked.waits:
        yield "the run ended at an interrupt without an answer: give the scenario a `resume` list, or --on-interrupt"
    numbers = {call.id: call.sequence for call in calls}
    depths: dict[str, int] = {}
    for call in calls:
        depths[call.id] = depths.get(call.continues or "", -1) + 1
        yield from _call(call, "  " * depths[call.id], numbers, checked.nodes)
    yield from _sums(calls, checked.nodes)
    yield from _elsewhere(checked)


def _call(call: Call, indent: str, numbers: Mapping[str, int], nodes: list[str]) -> Iterator[str]:
    where = "/".join(call.node.path) or "no node"
    agent = f" (agent {call.node.agent})" if call.node.agent else ""
    earlier = numbers.get(call.continues or "")
    follows = "begins a branch" if earlier is None else f"continues call {earlier}"
    drifted = ", DRIFTED: earlier tokens could not be kept" if call.drifted else ""
    level = "" if call.capture == "tokens" else f", capture level {call.capture}"
    prompt = f"{len(call.prompt_token_ids)} prompt tokens"
    yield f"{indent}call {call.sequence}  {where}{agent}  {call.model}  {follows}, {prompt}{drifted}{level}"
    for choice in call.choices:
        reason = exclusion(call, choice, nodes=nodes)
        verdict = "trains" if reason is None else f"does not train: {reason}"
        yield f"{indent}   → {_said(choice.message)}"
        yield f"{indent}     {len(choice.token_ids)} tokens sampled, {choice.finish_reason}; {verdict}"
    if call.error or not call.choices:
        yield f"{indent}   → {call.status}: {call.error or 'no whole answer; does not train'}"


def trained_tokens(calls: Iterable[Call], nodes: list[str]) -> int:
    """How many of the sampled tokens would train."""
    answers = ((call, choice) for call in calls for choice in call.choices)
    return sum(len(choice.token_ids) for call, choice in answers if exclusion(call, choice, nodes=nodes) is None)


def _sums(calls: list[Call], nodes: list[str]) -> Iterator[str]:
    sampled = sum(len(choice.token_ids) for call in calls for choice in call.choices)
    trained = trained_tokens(calls, nodes)
    branches = sum(call.continues is None for call in calls)
    drifted = sum(call.drifted for call in calls)
    yield (
        f"{trained} of {sampled} sampled tokens would train; {_many(branches, 'branch', 'branches')}, "
        f"{_many(drifted, 'drifted call')}"
    )


_MEANING = {
    "other_model": "calls for a model that is not the policy's went to their provider",
    "not_captured": "calls could not be captured and went to their provider",
    "no_request": "model calls made no request (a cache, or a class that is not known)",
    "after_end": "calls came after the agent had ended, and belong to no rollout",
    "hook_errors": "times our own callback failed",
    "route_errors": "times our own route failed; these calls went to their provider",
}


def _elsewhere(checked: Checked) -> Iterator[str]:
    for name, meaning in _MEANING.items():
        if checked.counts.get(name):
            details = ", ".join(f"{what} ×{count}" for what, count in checked.details.get(name, {}).items())
            yield f"{checked.counts[name]} {meaning}{f': {details}' if details else ''}"
    if checked.outside:
        yield (
            f"{checked.outside} requests of the openai SDK were made meanwhile by code that belongs to no rollout "
            "(a context that was lost?)"
        )


def _said(message: Mapping[str, Any]) -> str:
    parts = [str(message["content"])] if message.get("content") else []
    for call in message.get("tool_calls") or []:
        function = call.get("function", {})
        parts.append(f"{function.get('name')}({function.get('arguments')})")
    text = " ".join(" ".join(parts).split())
    return text if len(text) <= 160 else f"{text[:157]}…"


def _many(count: int, one: str, more: str | None = None) -> str:
    return f"{count} {one if count == 1 else more or one + 's'}"
