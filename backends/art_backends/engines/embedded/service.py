"""One model as the HTTP face sees it: names, prompt ids, room in the context, rows to sample.

It refuses, as ApiError in OpenAI's words: unknown models (404), prompts that do not fit the context
(``context_length_exceeded``), ids that are not in the vocabulary, messages that the template refuses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from art_backends.engines.embedded.answers import Answer
from art_backends.engines.embedded.protocol import ApiError, ChatBody, SamplingBody, TemplateBody
from art_backends.engines.embedded.render import ChatTemplate
from art_backends.engines.embedded.requests import Generation
from art_backends.engines.embedded.structured import Grammars
from art_backends.engines.embedded.text import Vocabulary
from art_backends.engines.embedded.tools import HermesParser
from art_backends.errors import TemplateError

MAX_ROWS = 1024


class Service:
    """Turns checked bodies into rows for ``engine``."""

    def __init__(self, engine: Any, vocabulary: Vocabulary, template: ChatTemplate, base_name: str) -> None:
        self.engine = engine
        self.vocabulary = vocabulary
        self.template = template
        self.base_name = base_name
        self.grammars = Grammars(vocabulary)

    def adapter(self, model: str | None) -> str | None:
        """The adapter that answers for ``model``: None is the base, which also answers where no model is named."""
        if model is None or model == self.base_name:
            return None
        if model in self.engine.adapters():
            return model
        raise ApiError(f"The model `{model}` does not exist.", status=404, param="model", code="model_not_found")

    def render(self, messages: Sequence[Mapping[str, Any]], body: TemplateBody) -> list[int]:
        """The ids that the template renders."""
        try:
            text = self.template.render(
                messages,
                body.tool_dicts(),
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                options=body.chat_template_kwargs,
            )
        except TemplateError as error:
            raise ApiError(str(error), param="messages") from error
        return self.vocabulary.encode(text, add_special_tokens=bool(body.add_special_tokens))

    def chat_prompt(self, body: ChatBody) -> list[int]:
        """The exact ids in kv_transfer_params if given, else the rendered messages."""
        params = body.kv_transfer_params or {}
        if "prompt_token_ids" not in params:
            return self.render(body.messages, body)
        return self.check_ids(params["prompt_token_ids"], "kv_transfer_params.prompt_token_ids")

    def check_ids(self, ids: Any, param: str) -> list[int]:
        """``ids`` if it is a non-empty list of token ids of this vocabulary."""
        if not isinstance(ids, list) or not ids:
            raise ApiError(f"{param} must be a non-empty list of token ids", param=param)
        for index in ids:
            if type(index) is not int or not 0 <= index < self.vocabulary.size:
                raise ApiError(
                    f"{param}: {index!r} is not a token id; the vocabulary has {self.vocabulary.size} tokens",
                    param=param,
                )
        return ids

    def room(self, prompt: Sequence[int], wanted: int | None, *, chat: bool) -> int:
        """Tokens to sample at most; the rest of the context where none is wanted."""
        limit = self.engine.max_model_len
        asked = len(prompt) + (wanted or 0)
        if asked <= limit and len(prompt) < limit:
            return limit - len(prompt) if wanted is None else wanted
        message = f"This model's maximum context length is {limit} tokens. However, "
        if wanted is None and chat:
            message += f"your messages resulted in {asked} tokens. Please reduce the length of the messages."
        elif chat:
            message += (
                f"you requested {asked} tokens ({len(prompt)} in the messages, {wanted} in the completion). "
                "Please reduce the length of the messages or completion."
            )
        else:
            message += (
                f"you requested {asked} tokens ({len(prompt)} in your prompt; {wanted or 0} for the completion). "
                "Please reduce your prompt; or completion length."
            )
        raise ApiError(message, param="messages" if chat else "prompt", code="context_length_exceeded")

    async def rows(
        self, body: SamplingBody, prompts: Sequence[list[int]], *, wanted: int | None, top_logprobs: int
    ) -> list[tuple[Generation, Answer]]:
        """``body.choices`` rows per prompt, in the order of the reply's choices."""
        adapter = self.adapter(body.model)
        count = len(prompts) * body.choices
        if count > MAX_ROWS:
            raise ApiError(f"{count} answers in one request; at most {MAX_ROWS}", param="n")
        budgets = [self.room(prompt, wanted, chat=isinstance(body, ChatBody)) for prompt in prompts]
        masks = await asyncio.to_thread(self.grammars.masks, body, count)
        stops = frozenset(body.stop_token_ids or ()) | (frozenset() if body.ignore_eos else self._eos)
        rows = []
        for index in range(count):
            prompt, budget = prompts[index // body.choices], budgets[index // body.choices]
            generation = Generation(
                prompt_ids=tuple(prompt),
                adapter=adapter,
                max_tokens=budget,
                temperature=1.0 if body.temperature is None else body.temperature,
                top_p=1.0 if body.top_p is None else body.top_p,
                top_k=max(body.top_k or 0, 0),
                # rows of one request must differ, and the same request must repeat
                seed=None if body.seed is None else (body.seed + index) % 2**63,
                stop_token_ids=stops,
                top_logprobs=top_logprobs,
                mask=None if masks is None else masks[index],
            )
            parser = None
            if isinstance(body, ChatBody) and body.parses_tools:
                parser = HermesParser(single=body.parallel_tool_calls is False)
            rows.append((generation, Answer(self.vocabulary, body, parser)))
        return rows

    @property
    def _eos(self) -> frozenset[int]:
        return self.vocabulary.eos_token_ids
