"""What went wrong in a rollout, as data: whose fault it was, and in words that can be stored.

It refuses to guess: only the SDK's own errors and those of the server count as the world's, whatever wraps them; all
else is the agent's.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import openai
from pydantic_core import PydanticSerializationError, to_jsonable_python

from art_backends.capture import provider_of
from art_backends.errors import ServerError
from art_backends.functions import own_traceback
from art_backends.trajectories import RolloutError

TEXT = 20_000  # characters of an error's text or traceback that are kept
AGENT_STATUSES = frozenset({400, 413, 422})  # answers to a request that was wrong: the agent's (context overflow, …)


def fault_of(error: BaseException) -> str | None:
    """What the world did wrong, if that is why the agent failed: engine, proxy or server trouble. Else None."""
    for cause in _causes(error):
        if isinstance(cause, openai.APIConnectionError):  # timeouts of the client too
            return f"{_whose(error)}: {brief(cause)}"
        if isinstance(cause, openai.APIStatusError) and cause.status_code not in AGENT_STATUSES:
            return f"{_whose(error)}: HTTP {cause.status_code}: {brief(cause)}"
        if isinstance(cause, ServerError):
            return f"server: {cause}"
    return None


def _whose(error: BaseException) -> str:
    hosts = [host for cause in _causes(error) if (host := provider_of(cause)) is not None]
    return f"the provider {hosts[0]}, of a model that is not the policy's" if hosts else "engine"


def describe(error: BaseException) -> RolloutError:
    """An exception of the agent as data, with the frames that are the agent's own, if there are any."""
    lines = own_traceback(error)
    shown = plain(lines[-TEXT:]) if '\n  File "' in lines else None
    return RolloutError(type=type(error).__name__, message=plain(str(error)), traceback=shown)


def jsonable(value: Any) -> Any:
    """A value as JSON: as it is where it can be, its text where it cannot. NaN and infinity become null."""
    try:
        return to_jsonable_python(value, fallback=plain, inf_nan_mode="null")
    except (PydanticSerializationError, ValueError, RecursionError, UnicodeError):
        return plain(value)


def brief(error: BaseException) -> str:
    """An exception in a line: type, text, and the last place in the code that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    text = plain(str(error)).strip().splitlines()
    return f"{type(error).__name__}{': ' + text[0][:500] if text else ''}{where}"


def _causes(error: BaseException) -> list[BaseException]:
    """An exception with all that it was raised from, and the members of groups."""
    found: list[BaseException] = []
    open_ends: list[BaseException | None] = [error]
    while open_ends:
        item = open_ends.pop()
        if item is None or any(item is known for known in found):
            continue
        found.append(item)
        open_ends.append(item.__cause__ or (None if item.__suppress_context__ else item.__context__))
        if isinstance(item, BaseExceptionGroup):
            open_ends.extend(item.exceptions)
    return found


def plain(value: Any) -> str:
    """Text of any value that every encoder takes: no half surrogate pairs."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except Exception as error:  # noqa: BLE001 - boundary: a repr is the user's code
        text = f"<{type(value).__name__}, whose repr raised {type(error).__name__}>"
    return text[:TEXT].encode("utf-8", "replace").decode()
