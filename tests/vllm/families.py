"""Model families for vLLM: a real chat template (those that the package trl carries), the parsers that go with it, and
how a model of the family would spell its answers. The models themselves are random, of one layer.

Spelled are answers in a way that no template would render again: other spaces, other order, another way to end a turn.
"""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.backends.proxy.conftest import TemplateEngine, templates_folder

REASON = "The user asks for the weather."


@dataclass(frozen=True)
class Family:
    """``template`` names a file of trl; ``flags`` are vLLM's. ``tags`` are tokens that stay in the text."""

    template: str
    form: str  # how tool calls are written: hermes, llama, xml, harmony
    flags: tuple[str, ...]
    eos: tuple[str, ...] = ("<|im_end|>",)
    tags: tuple[str, ...] = ()
    reasoning: bool = False
    opened: bool = False  # the generation prompt opens the reasoning
    parallel: bool = True
    kept: bool = True  # whether an earlier answer's reasoning may stay in the prompt
    sampling: tuple[tuple[str, float], ...] = ()  # of its generation_config.json

    @property
    def shows_reasoning(self) -> bool:
        """Whether the template renders an earlier message's reasoning behind the last question."""
        return "reasoning_content" in self.source

    @property
    def source(self) -> str:
        folder = templates_folder()
        assert folder is not None
        return (folder / f"{self.template}.jinja").read_text(encoding="utf-8")

    def calls(self, *cities: str) -> str:
        """What the model says to call the tool for each city."""
        if self.form == "harmony":
            (city,) = cities
            return (
                f"<|channel|>analysis<|message|>{REASON}<|end|><|start|>assistant to=functions.weather"
                f'<|channel|>commentary json<|message|>{{"city" :"{city}"}}<|call|>'
            )
        if self.form == "llama":
            (city,) = cities
            return f'{{"name":"weather",  "parameters": {{"city" : "{city}"}}}}<|eom_id|>'
        return self._thought() + "\n".join(self._call(city) for city in cities) + self.eos[0]

    def plain(self, text: str) -> str:
        """What the model says to give this answer."""
        if self.form == "harmony":
            thought = f"<|channel|>analysis<|message|>{REASON}<|end|><|start|>assistant"
            return f"{thought}<|channel|>final<|message|>{text}<|return|>"
        return self._thought() + text + self.eos[0]

    def _thought(self) -> str:
        if not self.reasoning:
            return ""
        return ("" if self.opened else "<think>\n") + REASON + "\n</think>\n\n"

    def _call(self, city: str) -> str:
        if self.form == "xml":
            return f"<tool_call>\n<function=weather>\n<parameter=city>\n{city}\n</parameter>\n</function>\n</tool_call>"
        return f'<tool_call>\n{{"name":"weather",  "arguments":{{"city" :"{city}"}}}}\n</tool_call>'

    def make(self, folder: Path) -> Path:
        """The model's folder."""
        tokenizer = TemplateEngine(self.source, self.eos).tokenizer
        tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in self.tags])
        more: dict[str, Any] = {"response_template": _response_template()} if self.form == "harmony" else {}
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token=self.eos[0], **more)
        fast.chat_template = self.source
        fast.save_pretrained(folder)
        ends = [fast.convert_tokens_to_ids(token) for token in self.eos]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            model = LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=len(fast),
                    hidden_size=128,
                    intermediate_size=128,
                    num_hidden_layers=1,
                    num_attention_heads=2,
                    num_key_value_heads=2,
                    max_position_embeddings=4096,
                    initializer_range=0.2,
                    bos_token_id=None,
                    eos_token_id=ends,
                )
            )
        model.generation_config = GenerationConfig(eos_token_id=ends, do_sample=True, **dict(self.sampling))
        model.save_pretrained(folder)
        return folder


def _response_template() -> Any:
    """gpt-oss's way to answer, in the form that vLLM's parser ``hf`` reads; trl has it as a literal."""
    folder = templates_folder()
    assert folder is not None
    tree = ast.parse((folder.parent / "chat_template_utils.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "gptoss_template":
            return ast.literal_eval(node.value)
    raise AssertionError("trl has no gptoss_template any more")


TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser")
HERMES_TAGS = ("<tool_call>", "</tool_call>")
THINKING_TAGS = ("<think>", "</think>", *HERMES_TAGS)
FAMILIES = {
    "qwen2_5": Family("qwen2_5", "hermes", (*TOOLS, "hermes"), tags=HERMES_TAGS),
    # drops the reasoning of earlier turns; samples by its own settings where a request is silent
    "qwen3": Family(
        "qwen3",
        "hermes",
        (*TOOLS, "hermes", "--reasoning-parser", "qwen3"),
        tags=THINKING_TAGS,
        reasoning=True,
        sampling=(("temperature", 0.6), ("top_p", 0.95), ("top_k", 20), ("repetition_penalty", 1.05)),
    ),
    # two end tokens, one tool call at a time
    "llama3_2": Family(
        "llama3_2",
        "llama",
        (*TOOLS, "llama3_json"),
        eos=("<|eot_id|>", "<|eom_id|>"),
        tags=("<|python_tag|>",),
        parallel=False,
    ),
    # two end tokens, a reasoning that stands before each call and is dropped behind a final answer
    "gptoss": Family(
        "gptoss",
        "harmony",
        (*TOOLS, "hf", "--reasoning-parser", "hf"),
        eos=("<|return|>", "<|call|>"),
        reasoning=True,
        parallel=False,
    ),
    # tool calls as XML, which are parsed into JSON and written as XML again; opens the reasoning itself
    "qwen3_6": Family(
        "qwen3_6",
        "xml",
        (*TOOLS, "qwen3_coder", "--reasoning-parser", "qwen3"),
        tags=THINKING_TAGS,
        reasoning=True,
        opened=True,
    ),
    # a parser that takes any end of reasoning in the prompt for that of the answer
    "qwen3 read by deepseek_r1": Family(
        "qwen3",
        "hermes",
        (*TOOLS, "hermes", "--reasoning-parser", "deepseek_r1"),
        tags=THINKING_TAGS,
        reasoning=True,
        kept=False,
    ),
}


def arguments(message: dict[str, Any]) -> list[Any]:
    """What the tools of an answer are called with."""
    return [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
