"""Messages and tools into prompt text, by one chat template per model.

A model's own template is used if it shows tools to the model; a ChatML model whose template does not gets
``hermes.jinja`` (for all of its conversations, so that one template explains every prompt; vLLM takes the same file
with ``--chat-template``). Messages are normalised the way vLLM does before a template sees them: text parts joined,
null content empty, the arguments of tool calls as mappings.

It refuses models without a template, images and other media, and whatever the template itself refuses, as
TemplateError in clear words. It never escapes or edits text: breaking up injected control strings is the proxy's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from art_backends.errors import TemplateError

HERMES_PATH = Path(__file__).with_name("hermes.jinja")

_MARK = "zq_marked_tool_zq"
_MARKED_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _MARK,
        "description": "A marked tool.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string", "description": "text"}}},
    },
}
_RESERVED = frozenset(
    {"conversation", "messages", "tools", "documents", "chat_template", "tokenize", "add_generation_prompt"}
    | {"continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
    | {"return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs"}
)
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


class ChatTemplate:
    """The template of one model. ``source`` is the template's text."""

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        """``template`` (text, not a path) wins over the model's own; raises TemplateError if there is none."""
        self._tokenizer = tokenizer
        given = template is not None
        source = template if template is not None else _own_template(tokenizer)
        if source is None:
            raise TemplateError(
                "the model has no chat template (a base model?): take an instruct model, or give a template file "
                "with --chat-template"
            )
        self.source: str = source
        self._own = tokenizer.chat_template
        self.shows_tools = self._shows_tools()
        if not self.shows_tools and not given and "<|im_start|>" in tokenizer.get_vocab():
            self.source = HERMES_PATH.read_text(encoding="utf-8")
            self.shows_tools = self._shows_tools()

    @property
    def is_the_models(self) -> bool:
        """Whether whoever reads the model's folder has this template without being told."""
        return bool(self.source == self._own)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text; TemplateError says what message or option the template cannot take."""
        clash = sorted(_RESERVED & set(options or ()))
        if clash:
            raise TemplateError(f"chat_template_kwargs may not set {', '.join(clash)}")
        if tools and not self.shows_tools:
            raise TemplateError(
                "the chat template of this model does not show tools to the model: give one that does with "
                "--chat-template (hermes.jinja fits ChatML models)"
            )
        return self._apply(
            normalise(messages),
            list(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **dict(options or {}),
        )

    def _apply(self, messages: list[dict[str, Any]], tools: list[Any] | None, **options: Any) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=self.source, tokenize=False, **options
            )
        except Exception as error:  # boundary: a template is a program of its own and may raise anything
            raise TemplateError(f"the chat template refuses these messages: {type(error).__name__}: {error}") from error
        return str(text)

    def _shows_tools(self) -> bool:
        user = [{"role": "user", "content": "hello"}]
        try:
            return _MARK in self._apply(user, [_MARKED_TOOL], add_generation_prompt=True)
        except TemplateError:
            return False


def _own_template(tokenizer: Any) -> str | None:
    own = tokenizer.chat_template
    if isinstance(own, Mapping):  # several by name: the one for tools knows more
        own = own.get("tool_use") or own.get("default")
    return own if isinstance(own, str) and own else None


def normalise(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates expect them: text content, tool-call arguments as JSON values. TemplateError else."""
    return [_message(index, message) for index, message in enumerate(messages)]


def _message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    where = f"messages[{index}]"
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise TemplateError(f"{where}: role must be a string")
    result = {key: value for key, value in message.items() if value is not None}
    result["content"] = _content(where, message.get("content"))
    if "reasoning_content" in result and "reasoning" not in result:
        result["reasoning"] = result["reasoning_content"]
    calls = result.pop("tool_calls", None)
    if calls is not None and not isinstance(calls, list):
        raise TemplateError(f"{where}.tool_calls must be a list")
    if calls:
        result["tool_calls"] = [_call(f"{where}.tool_calls[{at}]", call) for at, call in enumerate(calls)]
    return result


def _content(where: str, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise TemplateError(f"{where}.content must be a string, null or a list of parts")
    texts = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        text = part if isinstance(part, str) else part[key] if key is not None and key in part else None
        if not isinstance(text, str):
            raise TemplateError(f"{where}.content[{at}]: this engine takes text only, not a part of type {kind!r}")
        texts.append(text)
    return "\n".join(texts)


def _call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise TemplateError(f"{where} must be {{id, type: 'function', function: {{name, arguments}}}}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            raise TemplateError(f"{where}.function.arguments is not valid JSON: {arguments[:80]!r}") from None
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}
