"""An engine's /tokenize and /detokenize in miniature: a real Jinja chat template and a real byte-level BPE."""

import importlib.util
import json
import re
from collections.abc import AsyncIterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from art_backends.errors import TemplateError
from art_backends.trajectories import Call, CallStatus, CaptureLevel, Choice
from jinja2.exceptions import TemplateError as JinjaError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.backends.proxy.fake_engine import World, faked

CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n{{ {'name': c.function.name, 'arguments': c.function.arguments}"
    " | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = re.compile(
    r"<[|｜][^\s<>|｜'\"+]{1,40}[|｜]?>|<\|\"\|>|<[a-zA-Z_]{1,40}\|>|</?(?:start_of_turn|end_of_turn|sop)>|\[gMASK\]"
)


@lru_cache(maxsize=1)
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator(
        [CHATML, "The weather in Paris and Rome is sunny; the user asks the tool."] * 4, trainer
    )
    return tokenizer.to_str()


class TemplateEngine:
    """Renders with a chat template as an engine does: text parts joined, tool-call arguments parsed."""

    def __init__(
        self, template: str, eos: Sequence[str] = ("<|im_end|>",), parse_arguments: bool | None = None
    ) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = lambda value, indent=None, ensure_ascii=False, **_: json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent
        )
        environment.globals["raise_exception"] = self._refuse
        environment.globals["strftime_now"] = lambda _: "2026-01-01"
        source = re.sub(r"\{%(-?)\s*generation\s*(-?)%\}", r"{%\1 if true \2%}", template)
        source = re.sub(r"\{%(-?)\s*endgeneration\s*(-?)%\}", r"{%\1 endif \2%}", source)
        self._template = environment.from_string(source)
        self._parse = "['arguments'] +" not in template if parse_arguments is None else parse_arguments
        self.special_tokens = tuple(sorted({*SPECIAL.findall(template), *eos, "<s>", "</s>"}))
        self.tokenizer = Tokenizer.from_str(_trained())
        self.tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in self.special_tokens])
        self.eos_ids = frozenset(self.id(t) for t in eos)
        self.calls = 0

    @staticmethod
    def _refuse(message: str) -> None:
        raise JinjaError(message)

    def id(self, token: str) -> int:
        found = self.tokenizer.token_to_id(token)
        assert found is not None, token
        return found

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def spell(self, text: str) -> list[int]:
        """The text in single bytes: not as the tokenizer would write it. Control tokens stay themselves."""
        pieces = re.split("(" + "|".join(re.escape(t) for t in self.special_tokens) + ")", text)
        return [
            i
            for piece in pieces
            for i in ([self.id(piece)] if piece in self.special_tokens else [j for c in piece for j in self.encode(c)])
        ]

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def render(self, messages: Sequence[Any], tools: Any = None, generate: bool = True, **kwargs: Any) -> str:
        def shown(message: dict[str, Any]) -> dict[str, Any]:
            message = dict(message)
            content = message.get("content")
            message["content"] = "\n".join(p["text"] for p in content) if isinstance(content, list) else content or ""
            if message.get("tool_calls"):
                message["tool_calls"] = json.loads(json.dumps(message["tool_calls"]))
                for call in message["tool_calls"]:
                    if self._parse and isinstance(call["function"]["arguments"], str):
                        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
            else:
                message.pop("tool_calls", None)
            return message

        self.calls += 1
        try:
            return self._template.render(
                messages=[shown(m) for m in messages],
                tools=tools,
                add_generation_prompt=generate,
                bos_token="<s>",
                eos_token="</s>",
                **kwargs,
            )
        except (JinjaError, TypeError, ValueError) as error:
            raise TemplateError(f"the chat template refuses: {error}") from error

    async def tokenize(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        return self.encode(self.render(messages, tools, add_generation_prompt, **(chat_template_kwargs or {})))

    async def detokenize(self, ids: list[int]) -> str:
        self.calls += 1
        return self.decode(ids)

    def call(
        self,
        request: dict[str, Any],
        *answers: tuple[dict[str, Any], list[int]],
        call_id: str = "c1",
        finish: str = "stop",
        prompt: list[int] | None = None,
        continues: str | None = None,
    ) -> Call:
        """A finished call: the request, and for each choice the message as given to the app and the sampled ids."""
        kwargs = request.get("chat_template_kwargs") or {}
        ids = prompt or self.encode(self.render(request["messages"], request.get("tools"), **kwargs))
        return Call(
            id=call_id,
            status=CallStatus.OK,
            request=request,
            prompt_token_ids=ids,
            capture=CaptureLevel.TOKENS,
            continues=continues,
            choices=[
                Choice(index=i, message=m, finish_reason=finish, token_ids=t, logprobs=[-0.1] * len(t))
                for i, (m, t) in enumerate(answers)
            ],
        )


def templates_folder() -> Path | None:
    spec = importlib.util.find_spec("trl")
    folder = (
        Path(next(iter(spec.submodule_search_locations))) / "chat_templates"
        if spec and spec.submodule_search_locations
        else None
    )
    return folder if folder and folder.is_dir() else None


@pytest.fixture(scope="session")
def template_engine() -> type[TemplateEngine]:
    """TemplateEngine(template source, eos tokens)."""
    return TemplateEngine


@pytest.fixture(scope="session")
def chatml_source() -> str:
    return CHATML


@pytest.fixture
def chatml() -> TemplateEngine:
    return TemplateEngine(CHATML)


@pytest.fixture(scope="session")
def chat_templates() -> dict[str, str]:
    """Source of every text chat template that the package trl carries, by name."""
    folder = templates_folder()
    if folder is None:
        pytest.skip("the package trl (its chat templates) is not installed: pip install --no-deps trl==1.16.0")
    vision = {"idefics3", "llava_next", "smolvlm", "lfm2_2_5_vl", "qwen2_5_vl", "qwen3_vl"}
    return {
        path.stem: path.read_text(encoding="utf-8")
        for path in sorted(folder.glob("*.jinja"))
        if not path.stem.endswith("_training") and path.stem not in vision
    }


@pytest.fixture(scope="session")
def chatml_shared() -> TemplateEngine:
    """One for many examples; nothing in it changes but the count of its calls."""
    return TemplateEngine(CHATML)


@pytest.fixture
async def w() -> AsyncIterator[World]:
    async with faked() as made:
        yield made
