"""Writes the table of formats into docs/privacy.md: ``python docs/privacy.py``. A test compares page and formats.

It refuses to touch the rest of the page.
"""

from __future__ import annotations

from pathlib import Path

from art_backends.redaction import FORMATS

PAGE = Path(__file__).with_suffix(".md")
BEGIN, END = "<!-- formats -->\n", "<!-- end of formats -->\n"


def page(text: str) -> str:
    """The page with the table as it should be."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    rows = "".join(f"| `{item.name}` | `{item.expression.pattern.replace('|', chr(92) + '|')}` |\n" for item in FORMATS)
    return f"{before}{BEGIN}\n| name | pattern |\n|---|---|\n{rows}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
