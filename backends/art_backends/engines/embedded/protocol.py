"""The bodies the embedded engine accepts, checked, and the one shape of its errors.

The fields are OpenAI's plus the extensions of vLLM that the proxy uses (``return_token_ids``, exact prompts in
``kv_transfer_params``, ``top_k``, ``chat_template_kwargs``, …). Fields nobody knows are ignored, as vLLM does.

It refuses, with OpenAI's error envelope, what it cannot honour: a parameter that would change the sampling
(penalties, ``logit_bias``, …) is a 400 rather than silently without effect. Sampling defaults are temperature 1,
top_p 1, top_k off, whatever the model's own generation_config says: recorded logprobs must be reproducible.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20

# parameter: the values under which it does nothing
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "prompt_logprobs": (),
    "functions": ([],),
    "function_call": ("none",),
    "bad_words": ([],),
    "logits_processors": ([],),
    "chat_template": (),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "structured_outputs": (),
    "audio": (),
}


class ApiError(Exception):
    """A request that cannot be answered; becomes OpenAI's error envelope with this status."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code

    def envelope(self) -> dict[str, Any]:
        """``{"error": {"message", "type", "param", "code"}}``."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class Body(BaseModel):
    """Base of all request bodies: exact types (no "1" for 1), finite numbers, unknown fields ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: the counts so far in each chunk


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _schema_given(self) -> Self:
        if self.type == "json_schema" and (
            self.json_schema is None or not isinstance(self.json_schema.get("schema"), dict)
        ):
            raise ValueError("type json_schema needs json_schema.schema, a JSON schema")
        return self


class ToolFunction(Body):
    model_config = ConfigDict(extra="allow")
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    model_config = ConfigDict(extra="allow")
    type: Literal["function"]
    function: ToolFunction


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool
TokenIds = list[Annotated[int, Field(ge=0)]]


class SamplingBody(Body):
    """What chat and text completions share."""

    model: str | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    max_tokens: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name, neutral in _NEUTRAL.items():
                value = data.get(name)
                if value is not None and value not in neutral:
                    raise ValueError(f"{name} is not supported by this engine")
        return data

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream: true")
        if len(self.stops) > MAX_STOPS:
            raise ValueError(f"stop: at most {MAX_STOPS} strings")
        if "" in self.stops:
            raise ValueError("stop: an empty string cannot be a stop string")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats


class TemplateBody(Body):
    """What decides how messages become a prompt; shared by chat completions and /tokenize."""

    tools: list[Tool] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None  # None: templates write their own, a bare prompt gets the tokenizer's
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _template_consistent(self) -> Self:
        if self.tools is not None and not self.tools:
            raise ValueError("tools: an empty list; leave the field out instead")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message needs add_generation_prompt: false")
        return self

    def tool_dicts(self) -> list[dict[str, Any]] | None:
        """The tools as the client sent them, for the template."""
        return None if self.tools is None else [tool.model_dump(exclude_unset=True) for tool in self.tools]


class ChatBody(SamplingBody, TemplateBody):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    kv_transfer_params: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _chat_consistent(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is only allowed with logprobs: true")
        if self.tool_choice is not None and self.tool_choice != "none" and not self.tools:
            raise ValueError("tool_choice is only allowed when tools are given")
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            if all(tool.function.name != name for tool in self.tools or ()):
                raise ValueError(f"tool_choice names {name!r}, which is not among the tools")
        return self

    @property
    def parses_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"


class CompletionBody(SamplingBody):
    """``POST /v1/completions``."""

    prompt: str | TokenIds | list[str] | list[TokenIds]
    max_tokens: int | None = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    add_special_tokens: bool = True


class TokenizeBody(TemplateBody):
    """``POST /tokenize``: messages (rendered by the chat template) or a prompt."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = Field(None, min_length=1)
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("exactly one of messages and prompt is needed")
        return self


class DetokenizeBody(Body):
    model: str | None = None
    tokens: TokenIds


class LoadAdapterBody(Body):
    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1)


class UnloadAdapterBody(Body):
    lora_name: str = Field(min_length=1)


BodyT = TypeVar("BodyT", bound=Body)


def parse(kind: type[BodyT], data: Any) -> BodyT:
    """Check a decoded JSON body; ApiError 400 names the field."""
    if not isinstance(data, dict):
        raise ApiError("the body must be a JSON object")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        # a union's branches add their type names to the location: the field's own path is what a reader wants
        path = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or str(part).isidentifier())
        message = first["msg"].removeprefix("Value error, ")
        raise ApiError(
            f"Invalid value for {path}: {message}" if path else message, param=path.split(".")[0] or None
        ) from None
