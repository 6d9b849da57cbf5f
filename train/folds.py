"""k folds: each of k runs tests on another part of a set, so that each mesh is tested once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
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


def begin_folds(
    out: Path, task: str, folds: int | None, options: Mapping[str, Any], resume: bool
) -> tuple[int, dict[str, Any]]:
    """The number of folds, and the options of their runs, which a later call with `resume` finds in the folder.

    options: those that the user chose, as values of JSON

    Raises OptionError for a folder with a run, for other options than those of the earlier call, and see
    `check_folder`.
    """
    file = out / FOLDS
    choices = json.loads(json.dumps({"task": task, "folds": folds, **options}))
    if not resume:
        check_folder(out, resume)
        make_folder(out)
        write_atomically(file, json.dumps({"task": task, "folds": folds, "options": options}, indent=2) + "\n")
        return folds or 0, {**options}
    if not file.is_file():
        raise OptionError(f"{out}: there are no folds in this folder to resume")
    stored = json.loads(file.read_text())
    before = {"task": task, **stored, **stored["options"]}
    for name, value in choices.items():
        if value is not None and value != before.get(name):
            started = "without it" if before.get(name) is None else f"with {before[name]}"
            raise OptionError(f"{name} is {value}, but {out} was started {started}; resumed folds keep their options")
    return before["folds"], stored["options"]


def write_folds(out: Path, folds: int) -> Table:
    """Write results.json, folds.csv and per_mesh.csv about complete folds. → the first scores as a table

    Raises OptionError if they are not folds of one set.
    """
    results, per_mesh = [], list[list[Any]]()
    for fold in range(folds):
        folder = fold_folder(out, fold)
        results.append(json.loads((folder / "results.json").read_text()))
        with (folder / "per_mesh.csv").open(newline="") as file:
            header, *lines = csv_rows(file)
        per_mesh += [["fold", *header]] * (fold == 0) + [[fold + 1, *line] for line in lines]
    _check_meshes(out, [run["meshes"] for run in results])
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


def _check_meshes(out: Path, folds: Sequence[Mapping[str, Sequence[str]]]) -> None:
    """Raises OptionError unless each mesh of a fold is tested in one fold. folds: the names in each part of each"""
    tests = Counter(name for parts in folds for name in parts["test"])
    for fold, parts in enumerate(folds, 1):
        names = set().union(*parts.values())
        name = min((name for name in names | tests.keys() if tests[name] != 1 or name not in names), default=None)
        if name is not None:
            raise OptionError(
                f"{out}: the set has changed between the folds. {name} is {'' if name in names else 'not '}in fold "
                f"{fold}, and {tests[name]} folds test it. Begin again in another folder"
            )


def _scores_of(results: Mapping[str, Any]) -> dict[str, float]:
    """The scores in the content of results.json: its fractions, and those of each class or column."""
    scores = {name: value for name, value in results.items() if not name.endswith("_seconds")}
    for row in (*results.get("classes", ()), *results.get("columns", ())):
        scores |= {f"{row['name']} {name}": value for name, value in row.items()}
    return {name: value for name, value in scores.items() if isinstance(value, float)}
