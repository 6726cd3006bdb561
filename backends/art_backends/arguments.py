"""What both command lines say when they are called wrongly: what is wrong, in one line, and where the help is.

It refuses to print the whole usage for a slip of the pen, and to say of an option only that it is not known where a
similar one exists, or where it has no effect on this command.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

from art_backends.errors import did_you_mean


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser with short errors. ``idle``: options that other commands have and that do nothing here."""

    idle: Iterable[str] = ()
    _words: Sequence[str] = ()

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As argparse does; but what is left is an error of the command that it was given to."""
        self._words = sys.argv[1:] if args is None else list(args)
        found, left = super().parse_known_args(args, namespace)
        if left:
            self.error(f"unrecognized arguments: {' '.join(left)}")
        return found, left

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and end with exit code 2. An option that is not known comes before all else."""
        unknown = list(self._unknown())
        idle = [option for option in unknown if option in self.idle]
        if idle:
            verb, them = ("has", "it") if len(idle) == 1 else ("have", "them")
            message = f"{', '.join(idle)} {verb} no effect on this command: leave {them} out"
        elif unknown:
            options = [option for option in self._option_string_actions if option.startswith("--")]
            message = f"unrecognized arguments: {', '.join(unknown)}{did_you_mean(unknown, options)}"
        self.exit(2, f"{self.prog}: {message}\nsee `{self.prog} --help`\n")

    def _unknown(self) -> Iterator[str]:
        """Options among the words of this command that are neither known nor the beginning of a known one."""
        words = itertools.takewhile(lambda word: word != "--", self._words)
        if self._subparsers is not None:  # what follows the command is the command's
            words = itertools.takewhile(lambda word: word.startswith("-"), words)
        for word in words:
            option = word.partition("=")[0]
            if option.startswith("--") and not any(known.startswith(option) for known in self._option_string_actions):
                yield option

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(
                action, f"{value!r} is none of {', '.join(choices)}{did_you_mean(str(value), choices)}"
            )
