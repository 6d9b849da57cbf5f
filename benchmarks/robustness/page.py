"""Writes the tables of docs/robustness.md, or of another page, from results of `diffnet robustness`.

    python -m diffnet.benchmarks.robustness.page docs/robustness.md

A table stands between two comments in the page. The first names the file of its results, relative to the page:

    <!-- table of ../benchmarks/results/robustness-figures/results.json -->
    <!-- end of table -->
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from diffnet.geometry.files import write_atomically
from diffnet.train.metrics import percent

_TABLE = re.compile(r"(<!-- table of (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def with_tables(page: Path) -> str:
    """The text of a page, with each table made from its results. Where there are none, the page says so.

    Raises ValueError for a page without a place for a table.
    """

    def filled(place: re.Match[str]) -> str:
        results = page.parent / place[2]
        table = as_table(json.loads(results.read_text("utf-8"))) if results.exists() else "Not measured yet.\n"
        return place[1] + table + place[3]

    text, count = _TABLE.subn(filled, page.read_text("utf-8"))
    if count == 0:
        raise ValueError(f"{page}: no line <!-- table of FILE --> followed by <!-- end of table -->")
    return text


def as_table(results: dict[str, Any]) -> str:
    """The rows of results.json as a table in Markdown.

    >>> row = {"change": "mirrored", "kept": 0.98, "accuracy_before": 0.94, "accuracy": 0.945, "error": None}
    >>> print(as_table({"accuracy": 0.94, "rows": [row]}))
    | change | predictions kept | accuracy before | accuracy |
    |---|---|---|---|
    | none | 100.0 % | 94.0 % | 94.0 % |
    | mirrored | 98.0 % | 94.0 % | 94.5 % |
    <BLANKLINE>
    """
    unchanged = percent(results["accuracy"])
    lines = [
        "| change | predictions kept | accuracy before | accuracy |",
        "|---|---|---|---|",
        f"| none | {percent(1.0)} | {unchanged} | {unchanged} |",
    ]
    for row in results["rows"]:
        if row["error"] is None:
            cells = [percent(row[name]) for name in ("kept", "accuracy_before", "accuracy")]
        else:
            cells = [f"not measured: {row['error'].replace('|', '/')}", "", ""]
        lines.append(" | ".join(["| " + row["change"], *cells]).rstrip() + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        write_atomically(argument, with_tables(Path(argument)))
