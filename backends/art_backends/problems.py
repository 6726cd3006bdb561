"""What is wrong with a value of a setting, in a plain sentence: pydantic's errors in the words of this project.

It refuses to leave out the value that was given, and to fail: an error that it does not know is told in pydantic's
words.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from art_backends.errors import did_you_mean

_WANTED = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a smaller number",
    "int_type": "a whole number",
    "list_type": "a list of names",
    "list_of_tables": "a list of tables",
    "model_type": "a table",
    "path_type": "a path",
    "string_type": "text",
    "url_pattern": "an address such as https://api.openai.com/v1, without a user, query or fragment",
    "string_unicode": "text",
    # names have a pattern: the policy's becomes a part of file names
    "string_pattern_mismatch": (
        "1 to 64 letters, digits, dots, dashes and underscores that begin with a letter or a digit"
    ),
}
_LIMITS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def problem(error: Mapping[str, Any], shown: str, known: Iterable[str]) -> str:
    """A sentence about an error of pydantic's. ``shown``: the setting as the user wrote it; ``known``: all settings."""
    kind, given, limits = error["type"], error.get("input"), error.get("ctx", {})
    value = reprlib.repr(given)
    if kind == "extra_forbidden":
        return f"there is no setting {shown}{did_you_mean(shown, known)}"
    if kind in _LIMITS:
        words, key = _LIMITS[kind]
        return f"{shown} must be {words} {limits[key]:g}, not {str(given)[:80]}"  # text on a command line
    if kind == "literal_error":
        choices = str(limits["expected"])
        return f"{shown} must be {choices}, not {value}{did_you_mean(str(given), choices.split(chr(39))[1::2])}"
    if kind == "url_pattern":  # what was given may hold a password
        value = "what was given"
    if kind in _WANTED:
        items = "every item of " if len(error["loc"]) > 1 else ""
        return f"{items}{shown} must be {_WANTED[kind]}, not {value}"
    if kind == "missing":
        said, shown = f"{shown} is missing", ""
    else:
        said = str(error["msg"]).removeprefix("Value error, ")
    return f"{shown}: {said} (given: {value})" if shown else said
