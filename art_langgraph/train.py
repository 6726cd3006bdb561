"""Train an unmodified LangGraph graph in place: ``train`` and, in an event loop, ``atrain``.

    report = art_langgraph.train("my_app:graph", scenarios="tasks.jsonl", reward=score, steps=20)

It starts the server on the run folder, runs the graph on the scenarios with its model calls captured, and makes the
training steps that are still to be made. It refuses to touch the graph or the app's settings: outside of this call
nothing is changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from art_backends.backend import LocalServer
from art_backends.config import TrainConfig, load_toml, make_config
from art_backends.display import Display, make_display
from art_backends.errors import ConfigError
from art_backends.loop import run
from art_backends.report import Report
from art_backends.rewards.values import Reward
from art_backends.rollouts import Success
from art_backends.scenarios import Scenarios, prepared
from art_backends.tracking import Sink
from art_backends.waiting import run_to_end

from art_langgraph.capturing import capturing, placeholder_key
from art_langgraph.graphs import MakeInput, OnInterrupt, load_graph, run_graph
from art_langgraph.names import before_a_run


async def atrain(
    graph: Any,
    *,
    scenarios: Scenarios,
    reward: Reward,
    held_out: Scenarios | float | None = None,
    config: TrainConfig | Mapping[str, Any] | str | Path | None = None,
    to_input: MakeInput | None = None,
    on_interrupt: OnInterrupt | None = None,
    success: Success | None = None,
    display: Display | None = None,
    sinks: Iterable[Sink] = (),
    **settings: Any,
) -> Report:
    """Train the policy behind ``graph`` and return the report of the run.

    ``graph``: a compiled graph, a StateGraph, a function that makes one, or ``"module:attr"``.
    ``scenarios``: a JSON Lines file or objects. ``held_out``: the same, or a share of the scenarios (0.2) to hold out;
    without it success is not measured. ``reward(run)`` returns a number, or parts with ``"reward"``; may be async.
    ``config``: a TrainConfig, its values, or a TOML file; ``settings`` are TrainConfig's and win over it.
    ``to_input(scenario)`` makes the graph's input (default: its ``messages``, ``input`` or ``question``);
    ``on_interrupt(scenario, values)`` answers a graph that interrupts itself (default: the scenario's ``resume``).

    Raises ArtError with clear words; CancelledError when cancelled, after closing what was open.
    """
    with placeholder_key():
        made = settled(config, settings)
        loaded = load_graph(graph)
        training, testing = prepared(scenarios, held_out, made.seed)
        if not callable(reward):
            raise ConfigError(f"reward must be a function of a run, not {type(reward).__name__}")
        shown = make_display() if display is None else display

        async def run_agent(scenario: dict[str, Any]) -> Any:
            return await run_graph(loaded, scenario, to_input=to_input, on_interrupt=on_interrupt)

        async with loaded:
            for warning in before_a_run(loaded.graph, made.models, made.nodes):
                shown.warn(warning)
            begins = "" if made.init_adapter is None else f", to begin from {made.init_adapter}"
            shown.note(f"starting the server on {made.folder}: it loads {made.base_model}{begins}")
            async with LocalServer(made) as backend:
                with capturing() as told:
                    if told:
                        shown.warn(told)
                    return await run(
                        client=backend.client,
                        config=made,
                        scenarios=training,
                        held_out=testing,
                        run_agent=run_agent,
                        reward=reward,
                        display=shown,
                        success=success,
                        sinks=list(sinks),
                    )


def train(
    graph: Any,
    *,
    scenarios: Scenarios,
    reward: Reward,
    held_out: Scenarios | float | None = None,
    config: TrainConfig | Mapping[str, Any] | str | Path | None = None,
    to_input: MakeInput | None = None,
    on_interrupt: OnInterrupt | None = None,
    success: Success | None = None,
    display: Display | None = None,
    sinks: Iterable[Sink] = (),
    **settings: Any,
) -> Report:
    """``atrain`` to its end, for code without an event loop. KeyboardInterrupt on Ctrl-C, after a clean stop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        raise ConfigError(
            "train() was called where an event loop runs already (a notebook, async code): await atrain()"
        )
    made = settled(config, settings)
    shown = make_display() if display is None else display
    work = atrain(
        graph,
        scenarios=scenarios,
        reward=reward,
        held_out=held_out,
        config=made,
        to_input=to_input,
        on_interrupt=on_interrupt,
        success=success,
        display=shown,
        sinks=sinks,
    )
    # Frameworks run an agent's blocking parts in the default executor: as many at once as rollouts may run.
    return run_to_end(
        work,
        threads=made.concurrency + 8,
        stopping=lambda: shown.note("stopping: what runs is closed and kept; Ctrl-C again stops at once"),
    )


def settled(config: TrainConfig | Mapping[str, Any] | str | Path | None, settings: Mapping[str, Any]) -> TrainConfig:
    """One TrainConfig of a base and the settings that win over it; ConfigError names what is wrong."""
    if config is None:
        return make_config(settings, source="train()")
    if isinstance(config, str | Path):
        return make_config({**load_toml(Path(config)), **settings}, source=str(config), over=settings, by="train()")
    if isinstance(config, TrainConfig):
        return make_config({**config.model_dump(), **settings}, source="train()") if settings else config
    if isinstance(config, Mapping):
        return make_config({**config, **settings}, source="train()")
    raise ConfigError(f"config must be a TrainConfig, a mapping or a TOML file, not {type(config).__name__}")
