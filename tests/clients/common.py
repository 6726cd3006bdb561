"""What all client scripts share: the tool, and how they say what they saw. Each fails by its exit code."""

import json
import os
import sys

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
CITIES = ({"city": "Rome"}, {"city": "Oslo"})
OPENAI, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
ANTHROPIC = os.environ["ANTHROPIC_BASE_URL"]


def told(what: str, right: bool, seen: object = None) -> None:
    """A line of what was tried; the first that is wrong ends the script."""
    sys.stdout.write(json.dumps({"what": what, "right": right}) + "\n")
    sys.stdout.flush()
    if not right:
        raise SystemExit(f"{what}: {seen!r}")
