"""k folds: each of k runs tests on another part of a set, so that each mesh is tested once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any

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
    summary = dict[str, dict[str, float]]()
    for name in names:
        values = [row[name] for row in scores if name in row]
        summary[name] = {"mean": mean(values)} | ({"spread": stdev(values)} if len(values) > 1 else {})
    rows: list[list[Any]] = [["fold", "test_meshes", *names]]
    for fold, row in enumerate(scores):
        rows.append([fold + 1, len(results[fold]["meshes"]["test"]), *map(row.get, names)])
    rows += [[end, "", *(summary[name].get(end) for name in names)] for end in ("mean", "spread")]
    write_atomically(out / "folds.csv", csv_text(rows))
    write_results(out, {"task": results[0]["task"], "folds": folds, "scores": summary}, per_mesh)
    table = Table("score", f"mean of {folds} folds", "standard deviation")
    for name in names[:SHOWN_SCORES]:
        table.add_row(name, *map(number, summary[name].values()))
    return table


def _scores_of(results: Mapping[str, Any]) -> dict[str, float]:
    """The scores in the content of results.json: its fractions, and those of each class or column."""
    scores = {name: value for name, value in results.items() if not name.endswith("_seconds")}
    for row in (*results.get("classes", ()), *results.get("columns", ())):
        scores |= {f"{row['name']} {name}": value for name, value in row.items()}
    return {name: value for name, value in scores.items() if isinstance(value, float)}
