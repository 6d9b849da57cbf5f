"""What the programs of this folder share."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def run_diffnet(*words: object) -> None:
    """Run a command of `diffnet`, in a process of its own. Raises CalledProcessError if it fails."""
    subprocess.run([sys.executable, "-m", "diffnet", *map(str, words)], check=True)


def write_rows(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a CSV file with these columns."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
