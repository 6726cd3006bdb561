"""The command line, from settings; the parser, from templates that are in use."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from art_backends.config import TrainConfig
from art_backends.engines.embedded.render import HERMES_PATH
from art_backends.engines.vllm import command
from art_backends.errors import ConfigError

MODEL = command.Model(Path("/models/tiny"), 2048, "<tool_call>", own_template=True)


def made(gpu: bool = False, model: command.Model = MODEL, inherited: dict[str, str] | None = None, **settings: Any):
    config = TrainConfig(engine="vllm", base_model="org/tiny", **{"vllm": "sh -c serve", **settings})
    return command.start(config, model, template_file=Path("/run/t.jinja"), gpu=gpu, inherited=inherited or {})


def value(words: list[str], option: str) -> str:
    assert words.count(option) == 1, f"{option}: {words}"
    return words[words.index(option) + 1]


def test_the_command_begins_with_the_users_and_the_model():
    assert made().words[:5] == ["sh", "-c", "serve", "/models/tiny", "--served-model-name"]
    assert made(vllm="sh -c 'exec my vllm'").words[:5] == ["sh", "-c", "exec my vllm", "--model", "/models/tiny"]


@pytest.mark.parametrize(
    ("settings", "option", "wanted"),
    [
        ({}, "--served-model-name", "org/tiny"),
        ({}, "--max-model-len", "2048"),
        ({}, "--dtype", "float32"),
        ({"dtype": "bfloat16"}, "--dtype", "bfloat16"),
        ({}, "--max-loras", "3"),
        ({"max_staleness": 4}, "--max-loras", "6"),
        ({"max_staleness": 4}, "--max-cpu-loras", "12"),
        ({"rank": 1}, "--max-lora-rank", "1"),
        ({"rank": 2}, "--max-lora-rank", "8"),
        ({"rank": 8}, "--max-lora-rank", "8"),
        ({"rank": 9}, "--max-lora-rank", "16"),
        ({"rank": 129}, "--max-lora-rank", "256"),
        ({"rank": 321}, "--max-lora-rank", "512"),
        ({}, "--logprobs-mode", "processed_logprobs"),
        ({}, "--generation-config", "vllm"),
        ({}, "--tool-call-parser", "hermes"),
    ],
)
def test_what_exact_training_needs(settings, option, wanted):
    assert value(made(**settings).words, option) == wanted


def test_switches():
    words = made().words
    assert {"--enable-lora", "--enable-auto-tool-choice", "--enable-prefix-caching"} < set(words)
    assert "--chat-template" not in words, "the model has its own"
    other = command.Model(Path("/m"), 512, "plain", own_template=False)
    words = made(model=other).words
    assert value(words, "--chat-template") == "/run/t.jinja"
    assert "--enable-auto-tool-choice" not in words, "nobody knows how this template's calls look"


def test_the_users_options_come_last():
    assert made(vllm_args="--max-loras 9 --foo 'a b'").words[-4:] == ["--max-loras", "9", "--foo", "a b"]
    with pytest.raises(ValueError, match="vllm_args cannot be taken apart: No closing quotation"):
        made(vllm_args="--foo 'a")


def test_on_a_cpu_and_on_a_gpu():
    cpu, gpu = made(gpu=False, threads=1), made(gpu=True)
    assert "--enforce-eager" in cpu.words
    assert "--enforce-eager" not in gpu.words
    assert cpu.variables["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert cpu.variables["VLLM_CPU_OMP_THREADS_BIND"].isdecimal()
    assert not [name for name in gpu.variables if "CPU" in name]
    assert made(inherited={"VLLM_CPU_KVCACHE_SPACE": "9"}).variables["VLLM_CPU_KVCACHE_SPACE"] == "9"


def test_sleep_is_for_those_who_ask_for_it():
    assert "VLLM_SERVER_DEV_MODE" not in made(gpu=True).variables
    sleeping = made(gpu=True, vllm_sleep=True)
    assert sleeping.variables["VLLM_SERVER_DEV_MODE"] == "1"
    assert "--enable-sleep-mode" in sleeping.words
    assert "--enable-sleep-mode" not in made(gpu=False, vllm_sleep=True).words, "a CPU's vLLM refuses it"


def test_nothing_is_told_to_anybody():
    variables = made().variables
    assert {name: variables[name] for name in ("VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "HF_HUB_OFFLINE")} == {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    assert "PYTHONPATH" in made().without


def test_a_rank_that_vllm_has_no_room_for():
    with pytest.raises(ConfigError, match="rank: vLLM serves adapters of rank 512 at most, not 513"):
        made(rank=513)


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("qwen2_5", "hermes"),
        ("qwen3", "hermes"),
        ("qwen3_5_think", "qwen3_coder"),
        ("qwen3_6", "qwen3_coder"),
        ("nemotron_3_nano", "qwen3_coder"),
        ("glm4moe", "glm45"),
        ("gptoss", "openai"),
        ("llama3_1", "llama3_json"),
        ("llama3_2", "llama3_json"),
        ("llama3", None),
        ("lfm2_2_5", "lfm2"),
        ("gemma4", "gemma4"),
        ("gemma3", None),
        ("deepseekv3", "deepseek_v3"),
        ("muse_glimmer", "muse_glimmer"),
        ("phi3", None),
    ],
)
def test_the_parser_fits_the_template(template, parser):
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("the templates are those of the package trl, which is not installed")
    file = Path(spec.origin).parent / "chat_templates" / f"{template}.jinja"
    assert command.tool_parser(file.read_text(encoding="utf-8")) == parser


def test_our_own_template_has_the_parser_that_it_is_named_after():
    assert command.tool_parser(HERMES_PATH.read_text(encoding="utf-8")) == "hermes"
