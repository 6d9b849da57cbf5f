"""Tables in Markdown, and pages with tables. This loads no PyTorch."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

BLOCK = re.compile(r"(<!-- table (?:of )?(\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """
    >>> print(table(["a", "b"], [["1", "2"], ["3", ""]]))
    | a | b |
    |---|---|
    | 1 | 2 |
    | 3 | |
    <BLANKLINE>
    """
    text = ["|" + "".join(f" {cell} |" if cell else " |" for cell in row) for row in (heads, *lines)]
    return "\n".join([text[0], "|---" * len(heads) + "|", *text[1:], ""])


def percent(share: float | None) -> str:
    """
    >>> percent(0.9876), percent(None)
    ('98.8 %', 'not measured')
    """
    return "not measured" if share is None else f"{100 * share:.1f} %"


def updated(page: str, make: Callable[[str], str]) -> str:
    """The text of a page with its tables made anew.

    make: a function of the name in the comment above a table. If it raises FileNotFoundError, the table stays.
    """

    def replaced(match: re.Match[str]) -> str:
        try:
            return match[1] + make(match[2]) + match[3]
        except FileNotFoundError:
            return match[0]

    return BLOCK.sub(replaced, page)
