"""Errors of a command line: one line of what is wrong, one of where the help is."""

import pytest
from art_backends.arguments import CommandParser


@pytest.fixture
def parser():
    made = CommandParser(prog="tool")
    made.add_argument("--verbose", action="store_true")
    commands = made.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run")
    run.add_argument("file")
    run.add_argument("--steps", type=int)
    run.add_argument("--step-size", type=int)
    run.add_argument("--kind", choices=["one", "two"])
    run.add_argument("--needed", required=True)
    run.idle = {"--colour"}
    commands.add_parser("stop")
    return made


@pytest.mark.parametrize(
    ("words", "command", "said"),
    [
        ("run f --needed x --stepz 3", " run", "unrecognized arguments: --stepz; did you mean --steps?"),
        ("run f --needed x --stepz=3", " run", "unrecognized arguments: --stepz; did you mean --steps?"),
        ("run f --needde x", " run", "unrecognized arguments: --needde; did you mean --needed?"),
        ("run f --needed x --zzz --stepz 3", " run", "unrecognized arguments: --zzz, --stepz; did you mean --steps?"),
        ("run f --needed x more", " run", "unrecognized arguments: more"),
        ("run f --needed x -z", " run", "unrecognized arguments: -z"),
        ("run f --needed x --colour red", " run", "--colour has no effect on this command: leave it out"),
        ("run f", " run", "the following arguments are required: --needed"),
        ("run f --needed x --step 3", " run", "ambiguous option: --step could match --steps, --step-size"),
        ("run f --needed x --kind on", " run", "argument --kind: 'on' is none of one, two; did you mean one?"),
        ("run f --needed x -- --stepz", " run", "unrecognized arguments: -- --stepz"),
        ("rum --needed x", "", "argument COMMAND: 'rum' is none of run, stop; did you mean run?"),
        ("--verbos rum", "", "argument COMMAND: 'rum' is none of run, stop; did you mean run?"),
        ("--werbose stop", "", "unrecognized arguments: --werbose; did you mean --verbose?"),
        ("", "", "the following arguments are required: COMMAND"),
    ],
)
def test_one_line_and_where_the_help_is(parser, capsys, words, command, said):
    with pytest.raises(SystemExit) as left:
        parser.parse_args(words.split())
    assert left.value.code == 2
    assert capsys.readouterr() == ("", f"tool{command}: {said}\nsee `tool{command} --help`\n")


def test_without_arguments_those_of_the_process_count(parser, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["tool", "run", "f", "--needed", "x", "--stepz"])
    with pytest.raises(SystemExit):
        parser.parse_args()
    assert "did you mean --steps?" in capsys.readouterr().err


def test_what_is_right_is_taken_and_abbreviations_are(parser):
    options = parser.parse_args(["--verb", "run", "f", "--need", "x", "--kind", "two"])
    assert (options.verbose, options.file, options.needed, options.kind) == (True, "f", "x", "two")


def test_help_is_whole(parser, capsys):
    with pytest.raises(SystemExit) as left:
        parser.parse_args(["run", "--help"])
    assert left.value.code == 0
    assert "usage: tool run" in capsys.readouterr().out
