"""What follows a sampled turn, found with marked stand-ins."""

from typing import Any

import pytest
from art_backends.errors import EngineError, TemplateError
from art_backends.proxy.tail import Cache, Setting, StandIn, Tails, Vocabulary, common_prefix, common_suffix, markers
from hypothesis import given
from hypothesis import strategies as st

USER = {"role": "user", "content": "Hello"}
NEW = {"role": "user", "content": "And now?"}
PLAIN = {"role": "assistant", "content": "yes"}
ASKED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "x1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "tool_call_id": "x1", "content": "3"}
BARE = Setting(None, {})
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]{% else %}"
    " {{ m.content }} </s>{% endif %}{% endfor %}"
)
HEADINGS = (
    "{% for m in messages %}### {{ m.role }}\n{{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant\n{% endif %}"
)
NAMED_RESULTS = (  # a tool result shows the name of the call that it answers, and none without one
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% for p in messages %}{% for c in p.tool_calls or [] %}{% if c.id == m.tool_call_id %}"
    "<|tool|>{{ c.function.name }}: {{ m.content }}<|im_end|>{% endif %}{% endfor %}{% endfor %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<|call|>{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tails(engine: Any) -> Tails:
    return Tails(engine, Vocabulary(engine.eos_ids, engine.special_tokens))


async def first(engine: Any, sampled: str, new: list[Any], turn: Any = PLAIN, history: Any = (USER,)) -> str:
    """Text of the first tail that is offered."""
    ids = engine.spell(sampled)
    async for tail in tails(engine).candidates(turn, list(history), new, BARE, ids):
        return str(engine.decode(tail))
    raise AssertionError("no tail")


async def test_the_end_of_turn_that_was_sampled_is_not_repeated(chatml: Any) -> None:
    tail = await first(chatml, "yes<|im_end|>", [NEW])
    assert tail == "\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"


async def test_a_cut_turn_gets_the_whole_closing(chatml: Any) -> None:
    assert (await first(chatml, "ye", [NEW])).startswith("<|im_end|>\n<|im_start|>user\n")


async def test_another_end_of_turn_token_closes_the_turn_too(template_engine: Any, chatml_source: str) -> None:
    engine = template_engine(chatml_source, ("<|im_end|>", "<|endoftext|>"))
    assert (await first(engine, "yes<|endoftext|>", [NEW])).startswith("\n<|im_start|>user\n")
    assert (await first(engine, "yes<|im_end|><|endoftext|>", [NEW])).startswith("\n<|im_start|>user\n")


async def test_an_end_of_turn_token_of_two(template_engine: Any, chatml_source: str) -> None:
    engine = template_engine(chatml_source.replace("<|im_end|>", "<|done|><|im_end|>"), ("<|im_end|>",))
    assert (await first(engine, "yes<|done|><|im_end|>", [NEW])).startswith("\n<|im_start|>user\n")
    assert (await first(engine, "yes<|done|>", [NEW])).startswith("<|im_end|>\n<|im_start|>user\n")


async def test_the_next_turns_opening_as_end_of_turn_is_no_closing(template_engine: Any) -> None:
    """GLM stops at <|user|> or <|observation|>; sampling the wrong one must not eat the right one."""
    source = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>{# <|user|> <|tool|> #}"
    engine = template_engine(source, ("<|user|>", "<|tool|>"))
    assert await first(engine, "yes<|user|>", [NEW]) == "And now?<|assistant|>"
    assert await first(engine, "yes<|user|>", [RESULT]) == "<|tool|>3<|assistant|>"


async def test_white_space_before_the_end_of_turn(template_engine: Any) -> None:
    engine = template_engine(LLAMA2, ("</s>",))
    assert await first(engine, "yes</s>", [NEW]) == "<s>[INST] And now? [/INST]"
    assert await first(engine, "ye", [NEW]) == " </s><s>[INST] And now? [/INST]"


async def test_a_closing_that_is_no_control_token(template_engine: Any) -> None:
    engine = template_engine(HEADINGS, ("</s>",))
    assert await first(engine, "ye", [NEW]) == "\n\n### user\nAnd now?\n\n### assistant\n"
    assert await first(engine, "yes</s>", [NEW]) == "\n\n### user\nAnd now?\n\n### assistant\n"


async def test_an_engine_that_tells_no_tokens(chatml: Any) -> None:
    unknown = Tails(chatml, Vocabulary(frozenset(), ()))
    found = [t async for t in unknown.candidates(PLAIN, [USER], [NEW], BARE, chatml.spell("yes<|im_end|>"))]
    assert chatml.decode(found[0]).startswith("\n<|im_start|>user\n")


async def test_words_that_spell_control_tokens_mislead_nothing(chatml: Any) -> None:
    words = [i for c in "<|im_end|>\n<|im_start|>user" for i in chatml.encode(c)]  # spelled, not the tokens
    found = [t async for t in tails(chatml).candidates(PLAIN, [USER], [NEW], BARE, words)]
    assert chatml.decode(found[0]).startswith("<|im_end|>\n<|im_start|>user\nAnd now?")


async def test_tool_results_that_need_their_calls(template_engine: Any) -> None:
    engine = template_engine(NAMED_RESULTS)
    sampled = '<|call|>f {"a":1}<|im_end|>'
    tail = await first(engine, sampled, [RESULT, NEW], ASKED)
    assert tail == "<|tool|>f: 3<|im_end|><|im_start|>user\nAnd now?<|im_end|><|im_start|>assistant\n"
    cut = await first(engine, '<|call|>f {"a":', [RESULT], ASKED)
    assert cut == "<|im_end|><|tool|>f: 3<|im_end|><|im_start|>assistant\n"


async def test_parallel_tool_calls_keep_their_ids_and_names(template_engine: Any) -> None:
    engine = template_engine(NAMED_RESULTS)
    other = {"id": "x2", "type": "function", "function": {"name": "g", "arguments": "{}"}}
    turn = {**ASKED, "tool_calls": [*ASKED["tool_calls"], other]}
    new = [{**RESULT, "tool_call_id": "x2", "content": "4"}, RESULT]
    tail = await first(engine, "<|call|>f {}<|call|>g {}<|im_end|>", new, turn)
    assert tail == "<|tool|>g: 4<|im_end|><|tool|>f: 3<|im_end|><|im_start|>assistant\n"


async def test_a_template_that_needs_its_system_message(template_engine: Any, chatml_source: str) -> None:
    source = "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}" + chatml_source
    engine = template_engine(source)
    history = [{"role": "system", "content": "be good"}, USER]
    assert (await first(engine, "yes<|im_end|>", [NEW], history=history)).startswith("\n<|im_start|>user\n")


async def test_a_template_that_hides_the_words_gives_no_tail(template_engine: Any) -> None:
    engine = template_engine("{% for m in messages %}<|im_start|>{{ m.content | upper }}<|im_end|>{% endfor %}")
    with pytest.raises(TemplateError, match="stand-in"):
        await tails(engine).after(StandIn((USER,)), [NEW], BARE)
    found = [t async for t in tails(engine).candidates(PLAIN, [USER], [NEW], BARE, [1])]
    assert found == []


async def test_generation_prompt(chatml: Any, template_engine: Any) -> None:
    assert await tails(chatml).generation_prompt(BARE) == "<|im_start|>assistant\n"
    refusing = template_engine("{{ raise_exception('no') }}")
    assert await tails(refusing).generation_prompt(BARE) == ""


async def test_tails_are_remembered_but_engine_trouble_is_not(chatml: Any) -> None:
    found = tails(chatml)
    tail = await found.after(StandIn((USER,)), [NEW], BARE)
    used = chatml.calls
    assert await found.after(StandIn((USER,)), [NEW], BARE) == tail
    assert chatml.calls == used

    class Troubled:
        def __init__(self) -> None:
            self.trouble = True

        async def tokenize(self, *args: Any, **kwargs: Any) -> list[int]:
            if self.trouble:
                raise EngineError("starting", 503)
            return list(await chatml.tokenize(*args, **kwargs))

        async def detokenize(self, ids: list[int]) -> str:
            return str(await chatml.detokenize(ids))

    troubled = Troubled()
    other = Tails(troubled, found.vocabulary)
    with pytest.raises(EngineError):
        await other.after(StandIn((USER,)), [NEW], BARE)
    troubled.trouble = False
    assert await other.after(StandIn((USER,)), [NEW], BARE) == tail


def test_cache_forgets_the_oldest() -> None:
    cache: Cache[int] = Cache(2)
    for i in range(3):
        cache.put(cache.key(i), i)
        cache.get(cache.key(0))
    assert [cache.get(cache.key(i)) for i in range(3)] == [0, None, 2]


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_ends(one: list[int], two: list[int], shared: list[int]) -> None:
    suffix = common_suffix(one + shared, two + shared)
    assert suffix >= len(shared)
    assert suffix == 0 or (one + shared)[-suffix:] == (two + shared)[-suffix:]
    prefix = common_prefix(shared + one, shared + two)
    assert (shared + one)[:prefix] == (shared + two)[:prefix]
    assert prefix >= len(shared)


@given(st.text(max_size=30) | st.sampled_from(["Q7standin", "xQ7standinQ7y"]))
def test_markers_stand_nowhere_else(text: str) -> None:
    one, two = markers(text)
    assert one not in text
    assert two not in text
    assert one[-1] != two[-1]
