"""What a person sees of a run: a live panel on a terminal, plain lines anywhere else.

The loop tells a ``Display`` what happened; how it looks is decided here. It refuses to take part: nothing here
waits, reads or fails the run, and text of the app is shown as it is, never read as markup.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_SPARKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class StepLine:
    """The figures of one finished training step."""

    step: int
    steps: int
    reward: float | None
    success: float | None
    seconds: float
    errors: int = 0
    faults: int = 0
    version: str = ""
    skipped: str = ""  # why nothing was learned, if so
    loss: float | None = None  # shown where there are no rewards


class Display(Protocol):
    """What the loop says while it runs. All methods return at once."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def phase(self, name: str, total: int) -> None:
        """A new stretch of work begins: ``total`` things to do, 0 if not known."""

    def advance(self, done: int) -> None:
        """So many of them are done."""

    def step(self, line: StepLine) -> None:
        """A training step is finished."""

    def speed(self, tokens_per_second: float) -> None:
        """Tokens that the engine samples per second, now."""

    def note(self, text: str) -> None:
        """Something worth a line."""

    def warn(self, text: str) -> None:
        """Something that may need a person."""


@dataclass
class _State:
    """What both displays know. ``clock`` is injected so that tests need not wait."""

    clock: Callable[[], float]
    phase: str = "starting"
    total: int = 0
    done: int = 0
    speed: float | None = None
    last: StepLine | None = None
    rewards: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    step_ended: float | None = None

    def add(self, line: StepLine) -> None:
        self.last = line
        self.seconds.append(line.seconds)
        self.step_ended = self.clock()
        if line.reward is not None:
            self.rewards.append(line.reward)

    def left(self) -> float | None:
        """Seconds left of training: the mean of the last steps, less what this one has taken; None before the first."""
        if self.last is None or self.step_ended is None:
            return None
        recent = self.seconds[-5:]
        ahead = (self.last.steps - self.last.step) * sum(recent) / len(recent)
        return max(0.0, ahead - (self.clock() - self.step_ended))


class _Base:
    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self.console = console
        self.state = _State(clock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def phase(self, name: str, total: int) -> None:
        self.state.phase, self.state.total, self.state.done = name, total, 0

    def advance(self, done: int) -> None:
        self.state.done = done

    def step(self, line: StepLine) -> None:
        self.state.add(line)

    def speed(self, tokens_per_second: float) -> None:
        self.state.speed = tokens_per_second

    def note(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)

    def warn(self, text: str) -> None:
        self.console.print(Text(f"warning: {text}", style="yellow"), soft_wrap=True)


class PlainDisplay(_Base):
    """One line per phase and step, for logs and pipes."""

    def phase(self, name: str, total: int) -> None:
        if name != self.state.phase and not name.startswith("step "):
            self.note(f"{name}: {total} rollouts" if total else name)
        super().phase(name, total)

    def step(self, line: StepLine) -> None:
        super().step(line)
        self.note(step_text(line, self.state.speed, self.state.left()))


class RichDisplay(_Base):
    """A live panel at the bottom of the terminal; notes and the app's own output scroll above it."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        super().__init__(console, clock)
        self._live = Live(get_renderable=self.render, console=console, refresh_per_second=4, transient=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def render(self) -> Panel:
        """The panel as it stands now."""
        state = self.state
        table = Table.grid(padding=(0, 2))
        last = state.last
        table.add_row(Text("phase"), Text(state.phase))
        if last is not None:
            table.add_row(Text("step"), Text(f"{last.step} of {last.steps}"))
            if last.loss is None:
                table.add_row(Text("reward"), Text(f"{_figure(last.reward)}  {sparkline(state.rewards[-40:])}"))
                table.add_row(Text("success"), Text(_figure(last.success)))
            else:
                table.add_row(Text("loss"), Text(f"{last.loss:.4f}"))
        table.add_row(Text("tokens/s"), Text("–" if state.speed is None else f"{state.speed:.0f}"))
        left = state.left()
        table.add_row(Text("time left"), Text("–" if left is None else duration(left)))
        bar = ProgressBar(total=state.total or None, completed=state.done, pulse=not state.total)
        count = Text(f"{state.done} of {state.total}" if state.total else "")
        return Panel(Group(table, bar, count), title="training in place", width=min(self.console.width, 76))


def make_display(console: Console | None = None, *, clock: Callable[[], float] = time.monotonic) -> Display:
    """The live display on a terminal, plain lines otherwise."""
    console = console or Console()
    return RichDisplay(console, clock) if console.is_terminal else PlainDisplay(console, clock)


def plain_console() -> Console:
    """Text of apps and people is shown as it is: no markup, no emoji names."""
    return Console(markup=False, emoji=False, highlight=False)


def step_text(line: StepLine, speed: float | None = None, left: float | None = None) -> str:
    """A finished step in one line."""
    figure = f"reward {_figure(line.reward)}" if line.loss is None else f"loss {line.loss:.4f}"
    parts = [f"step {line.step}/{line.steps}", figure]
    if line.success is not None:
        parts.append(f"success {line.success:.3f}")
    parts.append(f"{line.seconds:.1f} s")
    if speed is not None:
        parts.append(f"{speed:.0f} tokens/s")
    if left is not None:
        parts.append(f"{duration(left)} left")
    if line.errors:
        parts.append(f"{line.errors} agent errors")
    if line.faults:
        parts.append(f"{line.faults} excluded")
    if line.skipped:
        parts.append(f"nothing learned: {line.skipped}")
    return "  ".join(parts)


def sparkline(values: list[float]) -> str:
    """Values as a row of bars, lowest to highest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[int((value - low) * scale)] for value in values)


def duration(seconds: float) -> str:
    """Seconds in words: ``45 s``, ``3 min 20 s``, ``2 h 05 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
