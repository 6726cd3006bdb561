"""Exact prefixes: the prompt of a call that continues an earlier call of its rollout.

Rendering a parsed answer again gives other tokens than the model sampled. So a request that continues an earlier call
is answered from that call's prompt ids + its sampled ids, verbatim, + the tail (``tail``). Before it is sent, the
decoded prompt is compared with what the engine would have rendered: apart from the model's own turns they read the
same. Where they do not, or the template refuses, or the engine shows nothing to go by, the plain request is sent and
the call counts as drifted; what continues nothing is a plain request and no drift.

Every prompt is sanitised (``control_tokens``), exact or not. It refuses to guess: there is no exact prompt without a
match (``continuation``) and a passed check. It sends nothing to the engine but /tokenize and /detokenize.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from art_backends.errors import ArtError, TemplateError
from art_backends.proxy import continuation, control_tokens
from art_backends.proxy.continuation import Match, RolloutIndex
from art_backends.proxy.control_tokens import sanitize
from art_backends.proxy.tail import Message, Renderer, Setting, Tails, Vocabulary
from art_backends.trajectories import Call, PromptMode

__all__ = ["Prefixer", "Prompt", "Renderer", "RolloutIndex", "sanitize"]

# With these the engine's prompt is not "the messages, then a generation prompt": value that is still ordinary.
_ORDINARY: dict[str, Any] = {
    "add_generation_prompt": True,
    "continue_final_message": False,
    "echo": False,
    "add_special_tokens": False,
    "chat_template": None,
}
_REASONING_ENDS = ("</think>", "<channel|>", "[/THINK]", "◁/think▷", "</seed:think>", "<|END_THINKING|>")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to send. ``messages`` and ``tools`` (control tokens broken up) replace the request's in either mode."""

    token_ids: list[int] | None  # None: send the plain request
    mode: PromptMode
    continues: str | None  # id of the call whose tokens the prompt begins with; None when plain
    choice: int | None  # index of that call's choice
    drifted: bool  # it continues an earlier call, but its tokens could not be kept
    reason: str | None  # why it is plain, where that needs a reason
    messages: list[Message] = field(default_factory=list)  # send these instead of the request's
    tools: list[Message] | None = None  # send these instead of the request's; None: the request has none
    broken_control_tokens: int = 0  # how many strings were broken up in messages and tools


def _check_form(request: Mapping[str, Any]) -> None:
    for name in ("messages", "tools"):
        value = request.get(name) or []
        if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
            raise TemplateError(f"'{name}' must be a list of objects")
    if not isinstance(request.get("chat_template_kwargs") or {}, Mapping):
        raise TemplateError("'chat_template_kwargs' must be an object")


class _DriftError(Exception):
    """The tokens of the call that is continued cannot be kept; the message says why."""


class Prefixer:
    """Makes prompts with one engine. Safe for concurrent use in one event loop.

    ``eos_ids`` and ``special_tokens`` are the engine's (its /tokenizer_info); either may be empty where unknown.
    ``history="template"``: never an exact prompt. ``keep_reasoning=False``: an answer that holds the end of a
    reasoning part is not kept in a prompt, because the engine's reasoning parser would misread it there.
    """

    def __init__(
        self,
        renderer: Renderer,
        *,
        eos_ids: frozenset[int] = frozenset(),
        special_tokens: Sequence[str] = (),
        history: Literal["exact", "template"] = "exact",
        keep_reasoning: bool = True,
        reasoning_ends: Sequence[str] = _REASONING_ENDS,
    ) -> None:
        self._renderer = renderer
        self._special_tokens = tuple(special_tokens)
        self._history = history
        self._keep_reasoning = keep_reasoning
        self._reasoning_ends = tuple(reasoning_ends)
        self._tails = Tails(renderer, Vocabulary(frozenset(eos_ids), self._special_tokens))

    async def prompt(self, request: Mapping[str, Any], earlier: Sequence[Call] | RolloutIndex = ()) -> Prompt:
        """The prompt of a request (body as the app sent it) of a rollout whose finished calls are ``earlier``.

        Raises nothing for trouble with the template or the engine: the plain request is the answer then. Raises
        TemplateError for a request that cannot be examined: messages or tools that are no lists of objects, or that
        nest too deeply. Such a request is to be refused (400).
        """
        _check_form(request)
        index = earlier if isinstance(earlier, RolloutIndex) else RolloutIndex.of(earlier)
        try:
            match, plain = self._examine(request, index)
        except RecursionError as error:
            raise TemplateError("messages or tools nest too deeply") from error
        return plain if match is None else await self._continue(match, plain, request, index)

    def _examine(self, request: Mapping[str, Any], index: RolloutIndex) -> tuple[Match | None, Prompt]:
        raw = request.get("messages") or []
        messages, broken = sanitize(raw, self._special_tokens, own=index.own(request))
        tools, broken_tools = control_tokens.sanitize_tools(request.get("tools"), self._special_tokens)
        plain = Prompt(
            token_ids=None,
            mode=PromptMode.RENDERED,
            continues=None,
            choice=None,
            drifted=False,
            reason=None,
            messages=messages,
            tools=tools,
            broken_control_tokens=broken + broken_tools,
        )
        return (index.match(request) if self._history == "exact" else None), plain

    async def _continue(self, match: Match, plain: Prompt, request: Mapping[str, Any], index: RolloutIndex) -> Prompt:
        """The exact prompt, or the plain one with the reason."""
        odd = [name for name, usual in _ORDINARY.items() if request.get(name, usual) not in (usual, None)]
        if odd:
            return replace(plain, drifted=True, reason=f"{odd[0]} is set: the prompt is not simply the messages")
        try:
            if not self._keep_reasoning and await self._reasons(match):
                return replace(plain, reason="reasoning: the engine would misread a kept one")
            setting = Setting(plain.tools, continuation.template_kwargs(request))
            ids = await self._exact(match, plain.messages, setting, index)
        except _DriftError as error:
            return replace(plain, drifted=True, reason=str(error))
        except ArtError as error:  # the template refuses, or the engine is in trouble: the plain request will show it
            return replace(plain, drifted=True, reason=f"the engine cannot render the messages: {error}")
        return replace(plain, token_ids=ids, mode=PromptMode.EXACT, continues=match.call.id, choice=match.choice.index)

    async def _reasons(self, match: Match) -> bool:
        text = await self._tails.decode(match.choice.token_ids)
        return any(end in text for end in self._reasoning_ends)

    async def _exact(self, match: Match, messages: list[Message], setting: Setting, index: RolloutIndex) -> list[int]:
        """Prompt ids + sampled ids + tail, checked."""
        if any(continuation.content_text(message.get("content")) is None for message in messages):
            raise _DriftError("media: exact prompts are for text")
        history, turn, new = messages[: match.position], messages[match.position], messages[match.position + 1 :]
        rendered = await self._renderer.detokenize(await self._tails.render(messages, setting))
        position = self._check_history(rendered, await self._contexts(match.call, index, setting))
        reason = "the template gives no tail: it refuses the stand-in"
        async for tail in self._tails.candidates(turn, history, new, setting, match.choice.token_ids):
            text = (await self._tails.decode(tail)).lstrip(" ")
            if rendered.endswith(text) and len(rendered) - len(text) >= position:
                return [*match.call.prompt_token_ids, *match.choice.token_ids, *tail]
            reason = "the template renders the new messages differently behind the real history"
        raise _DriftError(reason)

    async def _contexts(self, call: Call, index: RolloutIndex, setting: Setting) -> list[str]:
        """The text of what stands before, between the model's own turns in a call's prompt, generation prompts cut."""
        pieces: list[str] = []
        generation_prompt = await self._tails.generation_prompt(setting)
        walk: Call | None = call
        while walk is not None:
            before = index.call(walk.continues)
            start = _own_end(before, walk)
            if walk.id not in index.texts:
                piece = walk.prompt_token_ids[start:]
                # A tail was decoded when the call was made; the beginning of a rollout is too long to be remembered.
                decode = self._tails.decode if start else self._renderer.detokenize
                index.texts[walk.id] = await decode(piece)
            pieces.append(index.texts[walk.id].removesuffix(generation_prompt))
            walk = before if start else None
        return pieces[::-1]

    @staticmethod
    def _check_history(rendered: str, contexts: Sequence[str]) -> int:
        """Where the last context ends in the rendered text; _DriftError if they do not stand there in order."""
        if not rendered.startswith(contexts[0]):
            raise _DriftError("the template renders the beginning differently than before")
        position = len(contexts[0])
        for context in contexts[1:]:
            context = context.lstrip(" ")  # noqa: PLW2901 - some tokenizers drop a piece's leading space
            found = rendered.find(context, position)
            if found < 0:
                raise _DriftError("the template renders an earlier message differently than before")
            position = found + len(context)
        return position


def _own_end(before: Call | None, call: Call) -> int:
    """Where in the call's prompt ids the sampled ids of the call before it end; 0 if the prompt was rendered."""
    if before is None:
        return 0
    start, prompt = len(before.prompt_token_ids), call.prompt_token_ids
    if prompt[:start] != before.prompt_token_ids:
        return 0
    ends = [
        start + len(c.token_ids)
        for c in before.choices
        if c.token_ids and prompt[start : start + len(c.token_ids)] == c.token_ids
    ]
    return max(ends, default=0)
