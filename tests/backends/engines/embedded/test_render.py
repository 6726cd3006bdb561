"""Prompts from messages: one template per model, Hermes where the model's own shows no tools."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trl
from art_backends.engines.embedded.render import HERMES_PATH, ChatTemplate, normalise
from art_backends.errors import TemplateError

TOOL = {"type": "function", "function": {"name": "add", "description": "a & b", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"b": 2, "a": "é"}'}}
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
QWEN = TEMPLATES / "qwen2_5.jinja"


def test_hermes_takes_over_where_tools_would_not_be_shown(tokenizer: Any) -> None:
    template = ChatTemplate(tokenizer)
    assert template.source == HERMES_PATH.read_text(encoding="utf-8")
    text = template.render(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "1+2?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
            {"role": "tool", "tool_call_id": "1", "content": "3"},
            {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "4"}]},
            {"role": "assistant", "content": "3"},
            {"role": "user", "content": "thanks"},
        ],
        [TOOL],
    )
    call = '<tool_call>\n{"name": "add", "arguments": {"b": 2, "a": "é"}}\n</tool_call>'
    system, rest = text.split("<|im_end|>\n", 1)
    assert system.startswith("<|im_start|>system\nBe brief.\n\n")
    assert '\n{"name": "add", "description": "a & b", "parameters": {"type": "object"}}\n</tools>' in system
    assert rest == (
        "<|im_start|>user\n1+2?<|im_end|>\n"
        f"<|im_start|>assistant\n{call}\n{call}<|im_end|>\n"
        "<|im_start|>tool\n3<|im_end|>\n<|im_start|>tool\n4<|im_end|>\n"
        "<|im_start|>assistant\n3<|im_end|>\n"
        "<|im_start|>user\nthanks<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_hermes_without_tools_or_system_adds_nothing(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "system", "content": "late"}]
    text = ChatTemplate(tokenizer).render(messages, add_generation_prompt=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>system\nlate<|im_end|>\n"


def test_hermes_keeps_words_before_a_call(tokenizer: Any) -> None:
    text = ChatTemplate(tokenizer).render([{"role": "assistant", "content": "See:", "tool_calls": [CALL]}])
    assert "assistant\nSee:\n<tool_call>\n" in text


def test_hermes_takes_raw_openai_messages(tokenizer: Any) -> None:
    """vLLM may hand the file content parts and argument strings as they came."""
    raw = [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "tool_calls": [CALL]}]
    text = tokenizer.apply_chat_template(raw, chat_template=HERMES_PATH.read_text(encoding="utf-8"), tokenize=False)
    assert "user\na<|im_end|>" in text
    assert '"arguments": {"b": 2, "a": "é"}}' in text


def test_hermes_refuses_an_unknown_role(tokenizer: Any) -> None:
    with pytest.raises(TemplateError, match="Unknown message role: robot"):
        ChatTemplate(tokenizer).render([{"role": "robot", "content": "x"}])


def test_a_template_that_shows_tools_is_kept(new_tokenizer: Callable[..., Any]) -> None:
    own = QWEN.read_text(encoding="utf-8")
    template = ChatTemplate(new_tokenizer(own))
    assert template.source == own
    assert "# Tools" in template.render([{"role": "user", "content": "hi"}], [TOOL])


def test_a_template_that_is_given_wins(new_tokenizer: Callable[..., Any]) -> None:
    template = ChatTemplate(new_tokenizer(QWEN.read_text(encoding="utf-8")), "{{ messages[0].content }}!{{ mood }}")
    assert template.render([{"role": "user", "content": "hi"}], options={"mood": ":)"}) == "hi!:)"
    with pytest.raises(TemplateError, match="does not show tools"):
        template.render([{"role": "user", "content": "hi"}], [TOOL])


def test_no_template_is_told_at_once(new_tokenizer: Callable[..., Any]) -> None:
    with pytest.raises(TemplateError, match="no chat template"):
        ChatTemplate(new_tokenizer(None))


def test_named_templates(new_tokenizer: Callable[..., Any]) -> None:
    template = ChatTemplate(new_tokenizer({"default": "plain", "tool_use": "{{ tools }}{{ messages[0].content }}"}))
    assert template.render([{"role": "user", "content": "x"}]).endswith("x")


def test_options_may_not_replace_the_conversation(tokenizer: Any) -> None:
    with pytest.raises(TemplateError, match="may not set chat_template, tokenize"):
        ChatTemplate(tokenizer).render([{"role": "user"}], options={"tokenize": True, "chat_template": "x", "ok": 1})


def test_the_last_message_can_be_continued(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello, "}]
    text = ChatTemplate(tokenizer).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nHello, ")


def test_normalise() -> None:
    given = {"role": "user", "content": [{"type": "text", "text": "a"}, "b"], "name": None, "id": 4}
    assert normalise([given]) == [{"role": "user", "content": "a\nb", "id": 4}]
    call = {"type": "function", "function": {"name": "f", "arguments": ""}}
    message = normalise([{"role": "assistant", "tool_calls": [call], "reasoning_content": "hm"}])[0]
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"]["arguments"] == {}
    assert message["reasoning"] == "hm"
    assert call["function"] == {"name": "f", "arguments": ""}, "what was given is not changed"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"content": "x"}, r"messages\[0\]: role"),
        ({"role": "user", "content": 3}, r"messages\[0\]\.content must be"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, r"content\[0\].*'image_url'"),
        ({"role": "user", "content": [{"type": "text"}]}, "text only"),
        ({"role": "user", "content": [{"type": ["text"]}]}, "text only"),
        ({"role": "assistant", "tool_calls": {}}, "must be a list"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, r"tool_calls\[0\] must be"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "arguments is not valid JSON",
        ),
    ],
)
def test_messages_that_no_template_can_take(message: dict[str, Any], words: str) -> None:
    with pytest.raises(TemplateError, match=words):
        normalise([message])


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in TEMPLATES.glob("*.jinja") if "_training" not in path.stem)
)
def test_real_templates(new_tokenizer: Callable[..., Any], name: str) -> None:
    """Every one renders a conversation, and tools are shown to the model by its own template or by Hermes."""
    own = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    template = ChatTemplate(new_tokenizer(own))
    assert "where is it?" in template.render([{"role": "user", "content": "where is it?"}])
    assert template.shows_tools
    assert "add" in template.render([{"role": "user", "content": "hi"}], [TOOL])
    assert (template.source == own) is not (template.source == HERMES_PATH.read_text(encoding="utf-8"))
