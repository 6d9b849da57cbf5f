"""k folds: each of k runs tests on another part of a set, so that each mesh is tested once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from diffnet.geometry.errors import OptionError
from diffnet.geometry.files import csv_rows, csv_text, make_folder, write_atomically
from diffnet.train.metrics import number
from diffnet.train.run import check_folder, write_results

FOLDS = "folds.json"  # the number of folds and the options of their runs
SHOWN_SCORES = 20


def fold_folder(out: Path, fold: int) -> Path:
    """The folder of the run of a fold, which is counted from 0."""
    return out / f"fold_{fold + 1}"


def has_run(out: Path, fold: int) -> bool:
    """Whether the run of a fold is complete. It writes its page last."""
    return (fold_folder(out, fold) / "predictions.html").is_file()


def begin_folds(out: Path, folds: int | None, options: Mapping[str, Any], resume: bool) -> tuple[int, dict[str, Any]]:
    """The number of folds, and the options of their runs, which a later call with `resume` finds in the folder.

    options: those that the user chose, as values of JSON. Those of the earlier call come after them.

    Raises OptionError for a folder with a run, for another number of folds, and see `check_folder`.
    """
    file = out / FOLDS
    if not resume:
        check_folder(out, resume)
        make_folder(out)
        write_atomically(file, json.dumps({"folds": folds, "options": options}, indent=2) + "\n")
        return folds or 0, {**options}
    if not file.is_file():
        raise OptionError(f"{out}: there are no folds in this folder to resume")
    before = json.loads(file.read_text())
    if folds not in (None, before["folds"]):
        raise OptionError(f"folds is {folds}, but {out} was started with {before['folds']}")
    return before["folds"], {**before["options"], **options}


def write_folds(out: Path, folds: int) -> Table:
    """Write results.json, folds.csv and per_mesh.csv about complete folds. → the first scores as a table"""
    results, per_mesh = [], list[list[Any]]()
    for fold in range(folds):
        folder = fold_folder(out, fold)
        results.append(json.loads((folder / "results.json").read_text()))
        with (folder / "per_mesh.csv").open(newline="") as file:
            header, *lines = csv_rows(file)
        per_mesh += [["fold", *header]] * (fold == 0) + [[fold + 1, *line] for line in lines]
    scores = list(map(_scores_of, results))
    names = list(dict.fromkeys(name for row in scores for name in row))
    summary = {name: _summary_of([row[name] for row in scores if name in row]) for name in names}
    rows: list[list[Any]] = [["fold", "test_meshes", *names]]
    for fold, row in enumerate(scores):
        rows.append([fold + 1, len(results[fold]["meshes"]["test"]), *map(row.get, names)])
    rows += [[end, "", *(summary[name][end] for name in names)] for end in ("mean", "spread")]
    write_atomically(out / "folds.csv", csv_text(rows))
    write_results(out, {"task": results[0]["task"], "folds": folds, "scores": summary}, per_mesh)
    table = Table("score", f"mean of {folds} folds", "standard deviation")
    for name in names[:SHOWN_SCORES]:
        table.add_row(name, *map(number, summary[name].values()))
    return table


def _summary_of(values: Sequence[float]) -> dict[str, float | None]:
    """The mean, and the standard deviation of a sample, which one value doesn't have."""
    return {"mean": float(np.mean(values)), "spread": float(np.std(values, ddof=1)) if len(values) > 1 else None}


def _scores_of(results: Mapping[str, Any]) -> dict[str, float]:
    """The scores in the content of results.json: its fractions, and those of each class or column."""
    scores = {name: value for name, value in results.items() if _is_score(name, value)}
    for row in (*results.get("classes", ()), *results.get("columns", ())):
        scores |= {f"{row['name']} {name}": value for name, value in row.items() if _is_score(name, value)}
    return scores


def _is_score(name: str, value: Any) -> bool:
    return isinstance(value, float) and not name.endswith("_seconds")
