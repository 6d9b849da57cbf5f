"""The tables of what networks of `diffnet train` reach, from the CSV files of the programs in this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from diffnet.benchmarks.harness.results import read_csv
from diffnet.benchmarks.markdown import percent, table


def _share(text: str) -> str:
    return percent(float(text))


def _rounded(text: str) -> str:
    return f"{float(text):.3g}"


# For each program, a sentence and the columns: head, name in the CSV file, and how to show a value.
PROGRAMS: dict[str, tuple[str, dict[str, tuple[str, Callable[[str], str]]]]] = {
    "classification": (
        "the generated set of 30 classes, from mesh files to the report. Other runs shared the GPU and the cores.",
        {
            "seed": ("seed", str),
            "test accuracy": ("test_accuracy", _share),
            "total in seconds": ("seconds", _rounded),
            "training in seconds": ("training_seconds", _rounded),
        },
    ),
    "correspondence": (
        "all pairs of the test meshes. Errors are mean geodesic errors × 100 / √area.",
        {
            "method": ("row", str),
            "seed": ("seed", str),
            "error": ("mean_error_x100", _rounded),
            "pairs with left and right exchanged": ("flipped_pairs", str),
        },
    ),
    "geodesic_errors": (
        "190 pairs of meshes of about 5,000 vertices.",
        {
            "seed": ("seed", str),
            "cores": ("jobs", str),
            "seconds": ("seconds", _rounded),
            "seconds from the cache": ("seconds_from_cache", _rounded),
            "error × 100 of 1,000 samples": ("sampled_mean_error_x100", _rounded),
            "with exact distances": ("exact_mean_error_x100", _rounded),
        },
    ),
}


def tasks(results: Path) -> str:
    """Accuracy and time of whole commands, one row for each run of the programs in `benchmarks/tasks`.

    Programs without results are left out. Raises FileNotFoundError if there are none.
    """
    folder = results.parent / "tasks-h200"
    found = [path.stem for path in folder.glob("*.csv")]
    if not found:
        raise FileNotFoundError(folder)
    text = f"## Tasks\n\nFolder `{folder.name}`: one H200 and 16 cores.\n"
    for name, (says, columns) in PROGRAMS.items():
        if name not in found:
            continue
        rows = read_csv(folder / f"{name}.csv")
        lines = [[show(row[column]) for column, show in columns.values()] for row in rows]
        text += f"\n`python -m diffnet.benchmarks.tasks.{name} --out DIR`: {says}\n\n{table(list(columns), lines)}"
    return text
