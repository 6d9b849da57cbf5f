"""Tables of configurations, from the rows of an ablation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, stdev

from diffnet.benchmarks.markdown import table
from diffnet.benchmarks.tasks.configurations import BASE


def summary(rows: Sequence[dict[str, str]], data: str) -> str:
    """The configurations of a data set as a table in Markdown, the best first.

    The difference is to the base with the same seeds. It is real if it is above twice its standard error. Accuracies
    are in percent.

    >>> rows = [
    ...     {"data": "a", "configuration": name, "seed": str(seed), "held_out_score": str(accuracy),
    ...      "training_seconds": "2.0", "error": ""}
    ...     for name, accuracies in (("base", (0.80, 0.82)), ("cosine", (0.83, 0.84)))
    ...     for seed, accuracy in enumerate(accuracies)
    ... ]
    >>> print(summary(rows, "a"))
    | configuration | runs | held-out accuracy | difference to the base | real | training |
    |---|---|---|---|---|---|
    | `cosine` | 2 | 83.50 ± 0.50 % | +2.50 ± 0.50 | yes | 2.0 s |
    | `base` | 2 | 81.00 ± 1.00 % | | | 2.0 s |
    <BLANKLINE>
    """
    scores_of: dict[str, dict[int, float]] = {}
    seconds: dict[str, list[float]] = {}
    failed: dict[str, int] = {}
    for row in rows:
        if row["data"] != data:
            continue
        name = row["configuration"]
        if row["error"]:
            failed[name] = failed.get(name, 0) + 1
            continue
        scores_of.setdefault(name, {})[int(row["seed"])] = 100 * float(row["held_out_score"])
        seconds.setdefault(name, []).append(float(row["training_seconds"]))
    lines = []
    base = scores_of.get(BASE, {})
    for name in sorted(scores_of, key=lambda name: -mean(scores_of[name].values())):
        scores = scores_of[name]
        paired = [] if name == BASE else [scores[seed] - base[seed] for seed in scores if seed in base]
        difference, real = "", ""
        if paired:
            difference = _with_error(paired, sign="+")
            real = "yes" if abs(mean(paired)) > 2 * standard_error(paired) else "no"
        score = f"{_with_error(list(scores.values()))} %"
        lines.append([f"`{name}`", str(len(scores)), score, difference, real, f"{mean(seconds[name]):.1f} s"])
    lines += [[f"`{name}`", f"{count} failed", "", "", "", ""] for name, count in failed.items()]
    heads = ["configuration", "runs", "held-out accuracy", "difference to the base", "real", "training"]
    return table(heads, lines)


def overview(rows: Sequence[dict[str, str]], names: Sequence[str]) -> str:
    """The mean of each configuration on each set and over all sets as a table in Markdown, the best first.

    Scores are in percent. The mean over all sets is that of each seed, averaged over the seeds. It is left out
    for a configuration that lacks a set.

    >>> rows = [
    ...     {"data": data, "configuration": "cosine", "seed": str(seed), "held_out_score": str(score), "error": ""}
    ...     for data, scores in (("a", (0.80, 0.82)), ("b", (0.60, 0.62)))
    ...     for seed, score in enumerate(scores)
    ... ]
    >>> print(overview(rows, ["a", "b"]))
    | configuration | mean | a | b |
    |---|---|---|---|
    | `cosine` | 71.00 ± 1.00 | 81.00 ± 1.00 | 61.00 ± 1.00 |
    <BLANKLINE>
    """
    scores_of: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        if row["data"] in names and not row["error"]:
            scores = scores_of.setdefault(row["configuration"], {}).setdefault(row["data"], {})
            scores[row["seed"]] = 100 * float(row["held_out_score"])
    lines = []
    for configuration, of_sets in scores_of.items():
        seeds = set.intersection(*(set(scores) for scores in of_sets.values())) if len(of_sets) == len(names) else ()
        means = [mean(scores[seed] for scores in of_sets.values()) for seed in sorted(seeds)]
        cells = [_with_error(list(of_sets[name].values())) if name in of_sets else "" for name in names]
        lines.append(
            (mean(means) if means else -math.inf, [_with_error(means) if means else "", *cells], configuration)
        )
    lines.sort(key=lambda line: -line[0])
    return table(["configuration", "mean", *names], [[f"`{name}`", *cells] for _, cells, name in lines])


def standard_error(values: Sequence[float]) -> float:
    """The standard error of the mean. Infinite for a single value."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def _with_error(values: Sequence[float], sign: str = "") -> str:
    """The mean, and its standard error if there are several values."""
    error = f" ± {standard_error(values):.2f}" if len(values) > 1 else ""
    return f"{mean(values):{sign}.2f}{error}"
