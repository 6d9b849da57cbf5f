"""The tables of docs/robustness.md, from results of `diffnet robustness`."""

from __future__ import annotations

from typing import Any

from diffnet.benchmarks.markdown import table
from diffnet.train.metrics import percent


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
    lines = [["none", percent(1.0), unchanged, unchanged]]
    for row in results["rows"]:
        if row["error"] is None:
            cells = [percent(row[name]) for name in ("kept", "accuracy_before", "accuracy")]
        else:
            cells = [f"not measured: {row['error'].replace('|', '/')}", "", ""]
        lines.append([row["change"], *cells])
    return table(["change", "predictions kept", "accuracy before", "accuracy"], lines)
