"""What vLLM wrote becomes one error; the texts are vLLM's (0.32), pip's and the kernel's."""

import pytest
from art_backends.engines.vllm.said import explain
from art_backends.errors import ConfigError, ServerError

ENGINE = "(EngineCore pid=4711) ERROR 11-30 17:16:02 [core.py:1047] "
AT_LAST = (
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}"
)


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        ("/usr/bin/python: No module named vllm.entrypoints", ConfigError, r"interpreter has no vLLM .*vllm install"),
        ("ModuleNotFoundError: No module named 'vllm'", ConfigError, "this interpreter has no vLLM"),
        (
            "api_server.py: error: unrecognized arguments: --foo 3",
            ConfigError,
            "vllm_args: this vLLM has no option --foo 3",
        ),
        ("error: argument --dtype: invalid choice: 'x'", ConfigError, "vllm_args: argument --dtype: invalid choice"),
        (
            ENGINE + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.",
            ServerError,
            "not enough memory: lower --gpu-memory-utilization",
        ),
        (
            ENGINE
            + "ValueError: Free memory on device cuda:0 (3.1/79.2 GiB) on startup is less than desired GPU memory "
            "utilization (0.92, 72.8 GiB).",
            ServerError,
            "not enough memory",
        ),
        (ENGINE + "ValueError: No available memory for the cache blocks.", ServerError, "not enough memory"),
        (
            "  Value error, User-specified max_model_len (4096) is greater than the derived max_model_len "
            "(max_position_embeddings=512 or model_max_length=None in model's config.json).",
            ConfigError,
            r"max_model_len: max_model_len \(4096\) is greater",
        ),
        ("OSError: [Errno 98] Address already in use", ServerError, "its socket or port is taken"),
        ("KeyError: 'invalid tool call parser: x (chose from { y })'", ConfigError, "invalid tool call parser: x"),
    ],
)
def test_causes_are_found_above_the_last_line(line, kind, words):
    with pytest.raises(kind, match=words) as raised:
        raise explain(
            1,
            ["INFO starting", line, "Traceback (most recent call last):", AT_LAST],
            install="art-backends vllm install",
        )
    said = str(raised.value)
    assert said.startswith("vLLM did not start (exit code 1): ")
    assert said.endswith(AT_LAST), "the log's end is shown"


def test_what_is_not_known_is_the_last_error():
    error = explain(1, ["a line", ENGINE + "ValueError: something new", "more", AT_LAST, ""], install="x")
    assert isinstance(error, ServerError)
    assert str(error).startswith("vLLM did not start (exit code 1): ValueError: something new; end of its log:\n")


def test_killed_and_silent():
    assert "signal 9): it was killed, perhaps for want of memory" in str(explain(-9, [], install="x"))
    assert str(explain(3, [], install="x")) == "vLLM did not start (exit code 3); it wrote nothing"
