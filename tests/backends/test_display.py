import io

import pytest
from art_backends.display import PlainDisplay, RichDisplay, StepLine, duration, make_display, sparkline, step_text
from rich.console import Console


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def a_line(step=1, **fields):
    return StepLine(**{"step": step, "steps": 10, "reward": 0.5, "success": 0.25, "seconds": 30.0, **fields})


def console(terminal):
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)


def test_a_pipe_gets_plain_lines():
    out = console(False)
    display = make_display(out)
    assert isinstance(display, PlainDisplay)
    with display:
        display.phase("base evaluation", 40)
        display.advance(40)
        display.phase("step 1: rollouts", 32)
        display.speed(812.4)
        display.step(a_line())
        display.note("[bold]not markup[/bold]")
        display.warn("something")
    lines = out.file.getvalue().splitlines()
    assert lines == [
        "base evaluation: 40 rollouts",
        "step 1/10  reward 0.500  success 0.250  30.0 s  812 tokens/s  4 min 30 s left",
        "[bold]not markup[/bold]",
        "warning: something",
    ]


def test_long_lines_are_not_wrapped_in_a_pipe():
    out = console(False)
    make_display(out).note("x" * 500)
    assert out.file.getvalue() == "x" * 500 + "\n"


def test_a_terminal_gets_the_live_panel():
    out, clock = console(True), Clock()
    display = make_display(out, clock=clock)
    assert isinstance(display, RichDisplay)
    with display:
        display.phase("step 2: rollouts", 32)
        display.advance(16)
        display.step(a_line(step=2))
        display.speed(500.0)
        display.note("a note [of the app]")
    shown = out.file.getvalue()
    for text in ("step 2: rollouts", "2 of 10", "0.500", "0.250", "500", "4 min 00 s", "16 of 32", "[of the app]"):
        assert text in shown, text


def test_the_panel_shows_something_before_the_first_step():
    out = console(True)
    display = make_display(out)
    out.print(display.render())
    assert "starting" in out.file.getvalue()


def test_the_terminal_is_given_back_after_an_error():
    out = console(True)
    with pytest.raises(ValueError, match="trouble"), make_display(out):
        raise ValueError("trouble")
    assert "\x1b[?25h" in out.file.getvalue()  # the cursor is shown again


def test_time_left_runs_down_while_a_step_runs():
    clock = Clock()
    display = make_display(console(False), clock=clock)
    assert display.state.left() is None
    display.step(a_line(step=8, seconds=10.0))
    assert display.state.left() == 20.0
    clock.now = 5.0
    assert display.state.left() == 15.0
    clock.now = 99.0
    assert display.state.left() == 0.0


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"errors": 3}, "3 agent errors"),
        ({"faults": 2}, "2 excluded"),
        ({"skipped": "no spread"}, "nothing learned: no spread"),
        ({"reward": None}, "reward –"),
    ],
)
def test_a_step_says_what_went_wrong(fields, text):
    assert text in step_text(a_line(**fields))


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (60, "1 min 00 s"), (3599, "59 min 59 s"), (7500, "2 h 05 min")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_sparklines():
    assert sparkline([]) == ""
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([0.0, 0.5, 1.0]) == "▁▄█"
