"""Secrets in texts are replaced before a text is written: keys of providers, tokens, passwords in addresses.

``Redactor`` knows the formats of ``FORMATS`` (but for those switched off), the patterns of the settings, and the values
of environment variables that the settings name. What it finds becomes ``[redacted NAME]``. A call with a secret in it
keeps no token ids, because they would spell it, and does not train.

It refuses to look where nothing is written: what a model is asked, and what an agent is answered, stay as they are.
It cannot know a secret that looks like an ordinary word; name its pattern, or the variable that holds it.
"""

from __future__ import annotations

import logging
import os
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from art_backends.config import Privacy
from art_backends.errors import ConfigError
from art_backends.trajectories import Call, CaptureLevel, Choice

REDACTED = "redacted"  # why a call with a secret in it is excluded
SHORTEST = 8  # characters of a variable's value that is looked for
_REMEMBERED = 16_384  # parts of requests that were looked through: histories come again with every call


@dataclass(frozen=True)
class Format:
    """What a kind of secret looks like. A group named ``secret`` is what is replaced, else all of it; a text that
    holds none of the ``anchors`` is not searched (no anchors: it is)."""

    name: str
    expression: re.Pattern[str]
    anchors: tuple[str, ...] = ()


def _format(name: str, pattern: str, *anchors: str) -> Format:
    return Format(name, re.compile(pattern, re.DOTALL), anchors)


FORMATS = (
    _format(
        "private_key",
        r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY-----|$)",
        "PRIVATE KEY-----",
    ),
    _format("anthropic", r"\bsk-ant-[A-Za-z0-9_-]{20,}", "sk-ant-"),
    _format("openrouter", r"\bsk-or-[A-Za-z0-9_-]{20,}", "sk-or-"),
    _format("langfuse", r"\b[ps]k-lf-[A-Za-z0-9-]{20,}", "k-lf-"),
    _format("openai", r"\bsk-[A-Za-z0-9_-]{20,}", "sk-"),
    _format("stripe", r"\b[sr]k_(?:live|test)_[A-Za-z0-9]{16,}", "k_live_", "k_test_"),
    _format("google", r"\bAIza[A-Za-z0-9_-]{35}", "AIza"),
    _format("aws", r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b", "AKIA", "ASIA"),
    _format(
        "github",
        r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{22,})",
        "ghp_",
        "gho_",
        "ghu_",
        "ghs_",
        "ghr_",
        "github_pat_",
    ),
    _format("gitlab", r"\bglpat-[A-Za-z0-9_-]{20,}", "glpat-"),
    _format("slack", r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}", "xox"),
    _format("huggingface", r"\bhf_[A-Za-z0-9]{30,}", "hf_"),
    _format("groq", r"\bgsk_[A-Za-z0-9]{40,}", "gsk_"),
    _format("langsmith", r"\blsv2_(?:pt|sk)_[A-Za-z0-9_]{30,}", "lsv2_"),
    _format("npm", r"\bnpm_[A-Za-z0-9]{36}", "npm_"),
    _format("pypi", r"\bpypi-AgE[A-Za-z0-9_-]{40,}", "pypi-AgE"),
    _format("art", r"\bart-[A-Za-z0-9_-]{43}", "art-"),
    _format("jwt", r"\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*", "eyJ"),
    _format("bearer", r"\b[Bb]earer\s+(?P<secret>[A-Za-z0-9._~+/-]{20,}=*)", "earer"),
    _format("password_in_url", r"://[^/\s:@\"']{0,100}:(?P<secret>[^/\s@\"']{1,200})@", "://"),
)


class Redactor:
    """See the module. Thread-safe: what it remembers is a cache."""

    def __init__(self, privacy: Privacy | None = None, environment: Mapping[str, str] | None = None) -> None:
        """ConfigError for a pattern that is none, a format that is not known, a variable that is not set."""
        privacy = privacy or Privacy()
        names = {item.name for item in FORMATS}
        unknown = sorted(set(privacy.without) - names)
        if unknown:
            raise ConfigError(f"privacy.without: {', '.join(unknown)} is no known format ({', '.join(sorted(names))})")
        formats = [item for item in FORMATS if item.name not in privacy.without] if privacy.redact else []
        formats += [_given(name, pattern) for name, pattern in privacy.patterns.items()]
        formats += _values(privacy.secrets_of, os.environ if environment is None else environment)
        self._formats = formats
        anchors = sorted({anchor for item in formats for anchor in item.anchors})
        self._anchors = [anchor.encode() for anchor in anchors]
        always = any(not item.anchors for item in formats)
        self._hint = None if always else re.compile("|".join(map(re.escape, anchors)) or r"(?!)")
        self._clean: OrderedDict[int, None] = OrderedDict()  # hashes of parts without a secret

    def text(self, text: str) -> str:
        """The text with ``[redacted NAME]`` in the place of each secret."""
        if self._hint is not None and self._hint.search(text) is None:
            return text
        for item in self._formats:
            if not item.anchors or any(anchor in text for anchor in item.anchors):
                text = item.expression.sub(_replacement(item.name), text)
        return text

    def value(self, value: Any) -> Any:
        """The same for every text in a JSON value, names of fields too; without a secret, the very same object."""
        if not self._formats or value is None:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict) and not self._is_clean(value):
            found = {self.text(key) if isinstance(key, str) else key: self.value(item) for key, item in value.items()}
            same = found.keys() == value.keys() and all(found[key] is value[key] for key in value)
            return value if same else found
        if isinstance(value, list | tuple):
            items = [self.value(item) for item in value]
            return value if all(new is old for new, old in zip(items, value, strict=True)) else items
        return value

    def call(self, call: Call) -> Call:
        """The call as it may be written: the very same object if it holds no secret, else without token ids."""
        request = {key: self.value(item) for key, item in call.request.items()}
        choices = [self._choice(choice) for choice in call.choices]
        error = self.value(call.error)
        clean = all(request[key] is item for key, item in call.request.items())
        clean = clean and all(new is old for new, old in zip(choices, call.choices, strict=True))
        if clean and error is call.error:
            return call
        if clean:
            return call.model_copy(update={"error": error})
        changes = {"request": request, "choices": [_without_ids(choice) for choice in choices], "error": error}
        changes |= {"prompt_token_ids": [], "capture": CaptureLevel.TEXT, "excluded": call.excluded or REDACTED}
        return call.model_copy(update=changes)

    def _choice(self, choice: Choice) -> Choice:
        message = self.value(choice.message)
        return choice if message is choice.message else choice.model_copy(update={"message": message})

    def _is_clean(self, part: Any) -> bool:
        """Whether an object holds nothing that is searched for, told without a walk through it."""
        try:
            raw = orjson.dumps(part)
        except TypeError:  # lone surrogates, long integers
            return False
        key = hash(raw)
        if key in self._clean:
            return True
        if self._hint is None or any(anchor in raw for anchor in self._anchors):
            return False
        self._clean[key] = None
        if len(self._clean) > _REMEMBERED:
            self._clean.popitem(last=False)
        return True


class RedactingFormatter(logging.Formatter):
    """Another formatter's lines, tracebacks included, without secrets."""

    def __init__(self, inner: logging.Formatter | None, redactor: Redactor) -> None:
        super().__init__()
        self._inner = inner or logging.Formatter()
        self._redactor = redactor

    def format(self, record: logging.LogRecord) -> str:
        return self._redactor.text(self._inner.format(record))


def guard_logs(redactor: Redactor) -> None:
    """Let every handler of the root logger write without secrets; asking again replaces the redactor."""
    for handler in logging.getLogger().handlers:
        inner = handler.formatter
        if isinstance(inner, RedactingFormatter):
            inner = inner._inner
        handler.setFormatter(RedactingFormatter(inner, redactor))


def _without_ids(choice: Choice) -> Choice:
    return choice.model_copy(update={"token_ids": [], "logprobs": []})


def _given(name: str, pattern: str) -> Format:
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"privacy.patterns.{name}: {pattern!r} is no regular expression: {error}") from None
    if expression.match(""):
        raise ConfigError(f"privacy.patterns.{name}: {pattern!r} matches the empty text")
    return Format(name, expression)


def _values(names: list[str], environment: Mapping[str, str]) -> list[Format]:
    found = []
    for name in names:
        value = environment.get(name)
        if value is None:
            raise ConfigError(f"privacy.secrets_of: the environment has no {name}")
        if len(value) < SHORTEST:
            raise ConfigError(f"privacy.secrets_of: {name} has fewer than {SHORTEST} characters, which occur by chance")
        forms = {value, orjson.dumps(value).decode()[1:-1]}  # as it stands in arguments that are JSON, too
        longest_first = sorted(forms, key=len, reverse=True)
        found.append(Format(name, re.compile("|".join(map(re.escape, longest_first)))))
    return found


def _replacement(name: str) -> Any:
    def replace(match: re.Match[str]) -> str:
        said = f"[redacted {name}]"
        if "secret" not in match.re.groupindex:
            return said
        start, end = match.span("secret")
        whole, begin = match.group(0), match.start()
        return whole[: start - begin] + said + whole[end - begin :]

    return replace
