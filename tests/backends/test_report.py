import json
from pathlib import Path

import pytest
from art_backends import report as module
from art_backends.errors import ConfigError, StoreError
from art_backends.report import Evaluation, Example, Report, draw_curves, histogram, summary, wilson
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("successes", "count", "interval"),
    [  # values of the published formula, worked out by hand
        (0, 10, (0.0, 0.27753)),
        (5, 10, (0.23659, 0.76341)),
        (10, 10, (0.72247, 1.0)),
        (183, 200, (0.86808, 0.94624)),
    ],
)
def test_wilson(successes, count, interval):
    assert wilson(successes, count) == pytest.approx(interval, abs=1e-4)


def test_wilson_of_nothing():
    assert wilson(0, 0) is None


@given(st.integers(1, 500), st.floats(0, 1))
def test_the_interval_holds_the_share(count, share):
    low, high = wilson(share * count, count)
    assert 0 <= low <= share + 1e-9
    assert share - 1e-9 <= high <= 1


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], "no rewards"),
        ([0.0] * 24, "0 ×24"),
        ([1.0, 0.0, 0.5, 0.0], "0 ×2, 0.5 ×1, 1 ×1"),
        (list(range(11)), "0…2 ×2, 2…4 ×2, 4…6 ×2, 6…8 ×2, 8…10 ×3"),
    ],
)
def test_histogram(values, text):
    assert histogram(values) == text


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60))
def test_a_histogram_counts_every_value(values):
    assert sum(int(part.rpartition("×")[2]) for part in histogram(values).split(", ")) == len(values)


def a_report():
    return Report(
        policy="policy",
        base_model="base",
        version="policy@3",
        base_success=0.1,
        trained_success=0.9,
        confidence_interval=(0.8, 0.95),
        base_reward=0.2,
        trained_reward=0.95,
        held_out=50,
        examples=[
            Example(
                {"question": "How many rings?"},
                {"messages": [{"role": "assistant", "content": None, "tool_calls": [
                    {"function": {"name": "stock", "arguments": "{}"}}]}]},
                {"messages": [{"role": "assistant", "content": "We have\n52."}]},
                0.0,
                1.0,
            )
        ],
    )  # fmt: skip


def test_the_report_has_the_keys_and_is_replaced_whole(tmp_path):
    path = tmp_path / "new" / "report.json"
    a_report().write(path)
    a_report().write(path)
    written = json.loads(path.read_text())
    assert {
        "base_success", "trained_success", "confidence_interval", "train_seconds", "steps", "rollouts",
        "computed_to_unique_tokens", "drifted_calls", "mean_abs_logprob_difference", "engine_tokens_per_second",
        "model_digest",
    } <= set(written)  # fmt: skip
    assert written["confidence_interval"] == [0.8, 0.95]
    assert [file.name for file in path.parent.iterdir()] == ["report.json"]


def test_half_a_surrogate_pair_does_not_cost_the_report(tmp_path):
    report = a_report()
    report.examples[0].after = "\ud800"
    report.write(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        a_report().write(tmp_path / "file" / "report.json")


def test_the_summary_tells_before_and_after(tmp_path):
    text = "\n".join(summary(a_report(), tmp_path))
    assert "scenario: How many rings?" in text
    assert "before (reward 0.00): stock({})" in text
    assert "after  (reward 1.00): We have 52." in text
    assert "success on 50 held-out scenarios: 0.100 before, 0.900 after (95 %: 0.800 to 0.950)" in text
    assert f"art-backends serve --folder {tmp_path}" in text


def test_the_summary_says_when_nothing_was_measured(tmp_path):
    assert "success was not measured" in "\n".join(summary(Report("policy", "base"), tmp_path))


ROWS = [
    {"step": 1, "reward": 0.1, "success": None, "sampling/sampling_logp_difference/mean": 1e-5},
    {"step": 2, "reward": 0.4, "success": 0.5},
]


def test_curves_are_a_png(tmp_path):
    evaluations = [Evaluation(0, "policy@0", 3, 0.1, None), Evaluation(2, "policy@2", 3, 0.5, None)]
    draw_curves(ROWS, evaluations, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_curves_of_nothing(tmp_path):
    draw_curves([], [], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").exists()


def test_curves_that_cannot_be_written(tmp_path):
    with pytest.raises(StoreError, match="cannot be written"):
        draw_curves(ROWS, [], tmp_path / "nowhere" / "curves.png")


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "can_draw", lambda: False)
    with pytest.raises(ConfigError, match=r"art-inplace\[plot\]"):
        draw_curves(ROWS, [], tmp_path / "curves.png")


@pytest.mark.parametrize(
    ("version", "last"), [("policy@0", "nothing was learned so far: policy@0 is"), ("policy@3", "serve it: ")]
)
def test_only_what_was_learned_is_offered_to_be_served(version, last):
    assert summary(Report("policy", "model", version=version), Path("run"))[-1].startswith(last)
