"""What `check` says of a captured rollout."""

from art_backends.trajectories import Call, CallStatus, CaptureLevel, Choice, Node, Rollout, Sampling

from art_langgraph.check import Checked, lines


def call(number, node="agent:1", continues=None, text="said", tokens=3, **changes):
    message = {"role": "assistant", "content": text}
    fields = {
        "id": f"c{number}",
        "sequence": number,
        "status": CallStatus.OK,
        "model": "gpt",
        "node": Node(checkpoint_ns=node),
        "prompt_token_ids": [1] * (10 + number),
        "choices": [Choice(message=message, finish_reason="stop", token_ids=[2] * tokens, logprobs=[-1.0] * tokens)],
        "capture": CaptureLevel.TOKENS,
        "continues": continues,
    }
    return Call(**{**fields, **changes})


def told(*calls, nodes=(), counts=None, details=None, ended=None, outside=0):
    rollout = Rollout(id="r", policy="p", version="p@0", scenario_id="s1", calls=list(calls))
    return "\n".join(lines(Checked(rollout, ended, counts or {}, details or {}, outside, list(nodes))))


def test_the_tree_of_calls_and_what_would_train():
    tool = {"function": {"name": "look", "arguments": '{"x": 1}'}}
    first = call(0)
    first.choices[0].message["tool_calls"] = [tool]
    text = told(
        first,
        call(1, continues="c0", tokens=4),
        call(2, node="team:2|critic:3"),
        call(3, excluded="rerun"),
        call(4, sampling=Sampling(constrained=True), drifted=True),
        nodes=["agent"],
    )
    assert text.splitlines() == [
        "scenario s1: 5 calls",
        "call 0  agent  gpt  begins a branch, 10 prompt tokens",
        '   → said look({"x": 1})',
        "     3 tokens sampled, stop; trains",
        "  call 1  agent  gpt  continues call 0, 11 prompt tokens",
        "     → said",
        "       4 tokens sampled, stop; trains",
        "call 2  team/critic  gpt  begins a branch, 12 prompt tokens",
        "   → said",
        "     3 tokens sampled, stop; does not train: other_node",
        "call 3  agent  gpt  begins a branch, 13 prompt tokens",
        "   → said",
        "     3 tokens sampled, stop; does not train: rerun",
        "call 4  agent  gpt  begins a branch, 14 prompt tokens, DRIFTED: earlier tokens could not be kept",
        "   → said",
        "     3 tokens sampled, stop; does not train: constrained",
        "7 of 16 sampled tokens would train; 4 branches, 1 drifted call",
    ]


def test_a_call_without_an_answer_says_why():
    text = told(
        call(0, status=CallStatus.CANCELLED, choices=[]), call(1, status=CallStatus.ERROR, error="x", choices=[])
    )
    assert "   → cancelled: no whole answer; does not train" in text.splitlines()
    assert "   → error: x" in text.splitlines()


def test_what_went_elsewhere_and_how_it_ended():
    text = told(
        call(0, status=CallStatus.ERROR, error="no such model", choices=[]),
        ended="ValueError: oh",
        counts={"other_model": 2, "no_request": 1, "routed": 1},
        details={"other_model": {"claude": 2}},
        outside=3,
    )
    assert "the agent failed: ValueError: oh" in text
    assert "error: no such model" in text
    assert "2 calls for a model that is not the policy's went to their provider: claude ×2" in text
    assert "1 model calls made no request" in text
    assert "3 requests of the openai SDK were made meanwhile" in text
    assert "0 of 0 sampled tokens would train; 1 branch, 0 drifted calls" in text
