"""Tables with a line for each mesh: a file and its label or targets."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from diffnet.data.folders.files import Part, part_of
from diffnet.data.folders.numbers import text_of
from diffnet.data.labeled import DataError
from diffnet.geometry import FORMATS
from diffnet.geometry.files import csv_rows
from diffnet.geometry.mesh.mesh import mesh_suffix

Line = tuple[int, list[str]]


def read_table(table: Path, expected: str) -> list[Line]:
    """The lines of a CSV file that are not blank: their numbers from 1, and their stripped cells.

    expected: the columns, for the message

    Raises DataError for a file that is missing or is not a table of text.
    """
    try:
        lines = list(csv_rows(io.StringIO(text_of(table)), strict=True))
    except csv.Error as e:
        raise DataError(f"{table}: not a table {expected} of text ({e})") from e
    return [(number, [cell.strip() for cell in line]) for number, line in enumerate(lines, 1) if any(line)]


class TableMeshes:
    """The meshes and the splits in the lines of a table, checked line by line."""

    def __init__(self, table: Path) -> None:
        self._table = table
        self._lines: dict[Path, int] = {}
        self._has_split: bool | None = None

    def path(self, number: int, file: str) -> Path:
        """The path of a mesh, whose name is relative to the table.

        Raises DataError if there is no such mesh, and if another line has it.
        """
        path = self._table.parent / file
        if not path.is_file():
            raise DataError(f"{self._table}, line {number}: {path}: no such file")
        if mesh_suffix(path) not in FORMATS:
            raise DataError(f"{self._table}, line {number}: {file} is no mesh ({', '.join(FORMATS)}, also with .gz)")
        if path in self._lines:
            raise DataError(f"{self._table}, line {number}: {file} is in line {self._lines[path]}, too")
        self._lines[path] = number
        return path

    def part(self, number: int, split: str) -> Part | None:
        """The part that a split names. Raises DataError if it names none, and if only some lines have one."""
        part, more = part_of(split) or (None, "")
        if split and (part is None or more):
            raise DataError(f"{self._table}, line {number}: the split should be train, val or test, got {split[:40]!r}")
        if self._has_split is None:
            self._has_split = bool(split)
        if self._has_split != bool(split):
            raise DataError(f"{self._table}, line {number}: either all lines or none should have a split")
        return part
