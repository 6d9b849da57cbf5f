"""Tables in Markdown. This loads no PyTorch."""

from __future__ import annotations

from collections.abc import Sequence


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """
    >>> print(table(["a", "b"], [["1", "2"]]))
    | a | b |
    |---|---|
    | 1 | 2 |
    <BLANKLINE>
    """
    text = ["| " + " | ".join(row) + " |" for row in (heads, *lines)]
    return "\n".join([text[0], "|---" * len(heads) + "|", *text[1:], ""])


def percent(share: float | None) -> str:
    """
    >>> percent(0.9876), percent(None)
    ('98.8 %', 'not measured')
    """
    return "not measured" if share is None else f"{100 * share:.1f} %"
