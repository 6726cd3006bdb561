"""The command line of a vLLM that exact training can use, made of the settings.

Why each option is there stands beside it. What the user gives in ``vllm_args`` comes last, and argparse takes the last
one. The chat template decides the parser of tool calls: a table of what templates contain.

It refuses ranks that vLLM has no room for, and settings of another engine.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from art_backends.config import TrainConfig
from art_backends.engines.vllm import environment
from art_backends.errors import ConfigError

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for
KEEP_ALIVE_SECONDS = 120  # more than any client of ours keeps a connection idle: none is closed under a request
CPU_KV_GIB = 2

# (what the template contains, the parser that reads such calls); the first that fits, so the more special come first.
PARSERS = (
    (("<|channel|>",), "openai"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<arg_key>",), "glm45"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<start_function_call>",), "functiongemma"),
    (("<|tool_call>",), "gemma4"),
    (("<atem:",), "muse_glimmer"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<｜tool▁calls▁begin｜>", "tool['type'] + '<｜tool▁sep｜>'"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<tool_call>",), "hermes"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|tool|>",), "phi4_mini_json"),
    (("<|tool_call|>",), "granite"),
    (("<|action_start|>",), "internlm"),
    (("<|python_tag|>",), "llama3_json"),
    (("Environment: ipython",), "llama3_json"),
)


@dataclass(frozen=True)
class Model:
    """What the trainer's process found out about the base model."""

    path: Path
    max_model_len: int  # of the settings, or of the model if that is less
    chat_template: str  # in force
    own_template: bool  # it is the model's own


@dataclass(frozen=True)
class Start:
    """How vLLM is started: its words without the socket, variables to set and to leave out."""

    words: list[str]
    variables: dict[str, str]
    without: tuple[str, ...] = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")  # of our own environment


def start(
    config: TrainConfig,
    model: Model,
    *,
    template_file: Path,
    gpu: bool,
    inherited: Mapping[str, str] | None = None,
) -> Start:
    """The command for these settings. ConfigError names the setting that does not fit.

    ``template_file`` is where the template in force stands, used where it is not the model's own. ``inherited``: this
    process's environment, whose variables for the CPU win over ours.
    """
    inherited = os.environ if inherited is None else inherited
    words = environment.with_model(environment.command(config.vllm), str(model.path))
    words += ["--served-model-name", config.base_model]  # the name that the embedded engine gives it, too
    words += ["--dtype", config.dtype, "--max-model-len", str(model.max_model_len)]
    # as many versions at once as rollouts can be pinned to, the newest and the one being tried: at fewer, calls of one
    # version wait for those of another
    adapters = config.max_staleness + 2
    words += ["--enable-lora", "--max-loras", str(adapters), "--max-cpu-loras", str(2 * adapters)]
    words += ["--max-lora-rank", str(room(config.rank))]
    # logprobs of the distribution that was really sampled, temperature and all
    words += ["--logprobs-mode", "processed_logprobs"]
    # parameters that a request does not give are OpenAI's defaults, not those of the model's author
    words += ["--generation-config", "vllm"]
    words += ["--enable-prefix-caching"]  # turns of a rollout share their history
    words += ["--disable-uvicorn-access-log"]  # a line per request would fill the disk
    parser = tool_parser(model.chat_template)
    if parser is not None:
        words += ["--enable-auto-tool-choice", "--tool-call-parser", parser]
    if not model.own_template:
        words += ["--chat-template", str(template_file)]
    variables = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",  # on a socket that is ours alone
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_SECONDS),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",  # the model is a folder on this machine
        "PYTHONSAFEPATH": "1",  # we run in the app's folder, whose modules may be called as vLLM's are
    }
    if config.vllm_sleep:
        variables["VLLM_SERVER_DEV_MODE"] = "1"  # its sleep and wake routes
        if gpu:
            words += ["--enable-sleep-mode"]
    if not gpu:
        words += ["--enforce-eager"]  # LoRA on a CPU has no compilation anyway, and starts sooner
        ours = {"VLLM_CPU_KVCACHE_SPACE": str(CPU_KV_GIB), "VLLM_CPU_OMP_THREADS_BIND": _cores(config.threads)}
        variables |= {name: inherited.get(name) or value for name, value in ours.items()}
    return Start([*words, *shlex.split(config.vllm_args)], variables)


def room(rank: int) -> int:
    """The least rank that vLLM makes room for and that holds ``rank``."""
    for size in RANKS:
        if rank <= size:
            return size
    raise ConfigError(f"rank: vLLM serves adapters of rank {RANKS[-1]} at most, not {rank}")


def tool_parser(template: str) -> str | None:
    """The parser that reads the tool calls of a chat template; None if it shows none that is known."""
    return next((parser for marks, parser in PARSERS if all(mark in template for mark in marks)), None)


def _cores(threads: int) -> str:
    """The cores that vLLM's threads are bound to: its own default leaves one out, half of a small machine."""
    mine = list(range(os.cpu_count() or 1))
    if hasattr(os, "sched_getaffinity"):  # fewer in a container or under taskset
        mine = sorted(os.sched_getaffinity(0))
    return ",".join(map(str, mine[: threads or len(mine)]))
