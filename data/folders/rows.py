"""Sets with a class or with targets for each mesh: tables with a line for each mesh, and folders of classes."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

from diffnet.data.feature_names import TARGET_TABLE
from diffnet.data.folders.division import (
    AT_RANDOM,
    Division,
    Rule,
    check_fold,
    divide,
    folder_parts,
    in_parts,
    part_folders,
)
from diffnet.data.folders.files import Part, folders_in, has_meshes, listing, mesh_names, meshes_by, meshes_in, part_of
from diffnet.data.folders.sources import Fields, read_fields
from diffnet.data.labeled import DataError, counted
from diffnet.data.numbers import check_names, parse_number, table_lines
from diffnet.geometry import FORMATS
from diffnet.geometry.errors import OptionError
from diffnet.geometry.files import as_text
from diffnet.geometry.mesh.content import VTK_FORMATS
from diffnet.geometry.mesh.mesh import mesh_suffix

CLASS_TABLE = "labels.csv"  # the name of a table of classes in a folder
_CLASSES = ["file", "label"]  # its first line, if it has one


class Row(NamedTuple):
    """One mesh of a set.

    cells: the name of its class, or its targets as text
    split: its part, or None if that is not decided
    targets: the numbers in the cells
    line: its number in a table, which other meshes of the same participant share; 0 without one
    conditions: by name, the numbers in the columns of conditions that the table has
    """

    name: str
    path: Path
    cells: list[str]
    split: Part | None
    targets: Sequence[float] = ()
    line: int = 0
    conditions: Mapping[str, float] = {}


_Line: TypeAlias = tuple[int, list[str]]  # the number of a line of a table, and its cells
_Rows: TypeAlias = tuple[list[Row], str, list[str]]  # the meshes, what divides them, and what is left out


def find_classes(root: Path, rule: Rule, columns: Sequence[str] = ()) -> tuple[Division[Row], list[str]]:
    """The meshes of each part, and the names of the classes, see `load_classes`. No mesh is read.

    columns: the column of the classes in a table, or none for the one behind the file
    """
    if not root.exists():
        raise DataError(f"{root}: no such folder or table")
    table = root if root.is_file() else root / CLASS_TABLE
    if columns and not table.is_file():
        raise DataError(f"{root}: there is no table {CLASS_TABLE} for the column {columns[0]!r}")
    rows, source, strays = _class_table(table, rule, columns) if table.is_file() else _class_folders(root, rule)
    labels = [row.cells[0] for row in rows]
    names = sorted(set(labels))
    if rule.needs_train and len(names) < 2:
        raise DataError(f"{root}: {names[0]!r} is the only class; classification needs at least 2")
    division = _divided(root if root.is_dir() else root.parent, rows, source, rule, labels)
    for part in ("test", "train") if rule.needs_train else ():
        if missing := sorted({*names} - {*rule.ignored} - {row.cells[0] for row in division.parts[part]}):
            meshes = counted(labels.count(missing[0]), "mesh", "meshes")
            of = f" in fold {rule.fold[0] + 1} of {rule.fold[1]}" if rule.fold else ""
            raise DataError(f"{root}: class {missing[0]!r} has no {part} mesh{of}: it has {meshes}")
    if not division.parts["test"]:
        raise DataError(f"{root}: there are no test meshes")
    division = division if rule.needs_train else division.of_test()
    return replace(division, left_out=(*division.left_out, *strays)), names


def find_target_rows(
    root: Path, rule: Rule, targets: Sequence[str] | None = None, conditions: Sequence[str] = ()
) -> tuple[Division[Row], list[str]]:
    """The meshes of each part in a table, and the names of the columns of targets, see `load_targets`.

    targets: these columns. None for all but those of conditions.
    conditions: columns. Those that a table of VTK files lacks are left out, see `read_fields`.
    """
    table = root if root.is_file() else root / TARGET_TABLE
    if not table.is_file():
        wanted = ["COLUMN"] if targets is None else targets
        columns = ",".join(["file", *wanted, *conditions])
        hint = f", or --targets file:{wanted[0]} for targets at vertices, faces or edges" if wanted else ""
        raise DataError(f"{root}: no table. Expected {TARGET_TABLE} with the columns {columns}{hint}")
    rows, names, others = _numbered_rows(table, rule, targets, conditions)
    return _parts_of_table(table, rows, rule, others), names


def find_label_rows(table: Path, rule: Rule, columns: Sequence[str]) -> Division[Row]:
    """The meshes of each part in a table with label files in a column, or in none. Raises DataError."""
    lines, _, _, others = _lines_of_columns(table, rule.files, columns, ())
    return _parts_of_table(table, _table_rows(table, lines, len(columns), rule.without), rule, others)


def _parts_of_table(table: Path, rows: list[Row], rule: Rule, others: list[str]) -> Division[Row]:
    division = _divided(table.parent, rows, f"by the table {table.name}", rule)
    division = replace(division, left_out=(*division.left_out, *others))
    for part in rule.needed:
        if not division.parts[part]:
            raise DataError(f"{table}: there are no {part} meshes")
    return division if rule.needs_train else division.of_test()


def _numbered_rows(
    table: Path, rule: Rule | None, targets: Sequence[str] | None, conditions: Sequence[str]
) -> tuple[list[Row], list[str], list[str]]:
    """The meshes in a table with their numbers, the names of the columns of targets, and what is left out.

    See `find_target_rows`.
    """
    files, without = (rule.files, rule.without) if rule else (None, ())
    lines, names, conditions, others = _lines_of_columns(table, files, targets, conditions)
    rows = _table_rows(table, lines, len(names) + len(conditions), without)
    for i, ((number, _), row) in enumerate(zip(lines, rows, strict=True)):
        cells = zip([*names, *conditions], row.cells, strict=True)
        values = [parse_number(f"{table}, line {number}, column {name}", cell) for name, cell in cells]
        by_name = dict(zip(conditions, values[len(names) :], strict=True))
        rows[i] = row._replace(targets=values[: len(names)], conditions=by_name)
        missing = [name for name, value in by_name.items() if math.isnan(value)]
        if missing:
            raise DataError(f"{table}, line {number}: the condition {missing[0]} is missing")
    return rows, names, others


def table_conditions(table: Path, rule: Rule | None, names: Sequence[str]) -> dict[Path, Mapping[str, float]]:
    """The conditions of the meshes in a table, by their resolved paths."""
    return {row.path.resolve(): row.conditions for row in _numbered_rows(table, rule, (), names)[0]}


def conditions_of(sources: Sequence[Path], texts: Sequence[str], names: Sequence[str]) -> list[dict[str, float]]:
    """The conditions of meshes, from texts such as "speed=30" for all of them, and from tables with a line for each.

    names: of the conditions. A table has a column for each that no text gives. Those of VTK files may be missing, see
        `with_fields`.

    Raises OptionError for a text that is neither, and for a name that is missing or none of these; DataError for a mesh
    that is in no table.
    """
    common = [text.partition("=") for text in texts if "=" in text]
    values = {name.strip(): parse_number(f"--condition {name}", number) for name, _, number in common}
    if len(values) < len(common):
        raise OptionError(f"--condition gives a condition twice: {listing(text for text in texts if '=' in text)}")
    rest = [name for name in names if name not in values]
    rows = [{**values} for _ in sources]
    for table in (Path(text) for text in texts if "=" not in text):
        if not rest:
            raise OptionError(f"--condition {table}: the network has no condition that others don't give")
        by_path = table_conditions(table, None, rest)
        for source, row in zip(sources, rows, strict=True):
            if source.resolve() not in by_path:
                raise DataError(f"{table}: there is no line for {source}")
            row.update(by_path[source.resolve()])
        rest = [name for name in rest if any(name not in row for row in rows)]
    are_missing = bool(rest) and not all(mesh_suffix(source) in VTK_FORMATS for source in sources)
    if are_missing or values.keys() - set(names):
        asked = f"--condition {rest[0]}=NUMBER is missing" if are_missing else "--condition names another one"
        raise OptionError(f"{asked}; the conditions of the network are {listing(names) or 'none'}")
    return rows


def with_fields(
    mesh: Path, conditions: Mapping[str, float], names: Sequence[str], fields: Fields | None = None
) -> dict[str, float]:
    """The conditions of a mesh in the order of their names, of which those that are missing are in its file.

    fields: the numbers in the field data of the file, which is read by default

    Raises DataError for one that is not there, and MeshError for a mesh that can't be read.
    """
    missing = [name for name in names if name not in conditions]
    present = (read_fields(mesh) if fields is None else fields).values if missing else {}
    for name in missing:
        if name not in present:
            raise DataError(
                f"{mesh}: the condition {name!r} is no column of a table, and no number in the field data of the file, "
                f"which has {listing(present) or 'none'}"
            )
    return {name: conditions[name] if name in conditions else present[name] for name in names}


def _lines_of_columns(
    table: Path, files: str | None, targets: Sequence[str] | None, conditions: Sequence[str]
) -> tuple[list[_Line], list[str], list[str], list[str]]:
    """The lines behind the first one with the columns of `_columns` alone, and what is left out.

    Returns the lines, the names of the columns of targets, those of conditions, and texts of what is left out.
    """
    lines, others = _table_lines(table, files)
    header = lines[0][1] if lines else []
    place = next((i for i, name in enumerate(header) if name.lower() == "file"), 0)
    of_vtk = any(mesh_suffix(cell) in VTK_FORMATS for _, cells in lines[1:] for cell in cells[place : place + 1])
    conditions = [name for name in conditions if name in header or not of_vtk]
    names, places = _columns(table, header, targets, conditions)
    for number, cells in lines[1:]:
        if len(cells) != len(header):
            raise DataError(f"{table}, line {number}: {len(cells)} cells, but the first line has {len(header)}")
    lines = [(number, [cells[place] for place in places]) for number, cells in lines[1:]]
    return lines, names, conditions, others


def _columns(
    table: Path, header: list[str], targets: Sequence[str] | None, conditions: Sequence[str]
) -> tuple[list[str], list[int]]:
    """The names of the columns of targets, and the numbers of the columns: file, targets, conditions, perhaps split.

    For the rest see `find_target_rows`. Raises DataError if one is missing or ambiguous.
    """
    lower = [name.lower() for name in header]
    others = [name for name in header if name.lower() not in ("file", "split") and name not in conditions]
    names = others if targets is None else list(targets)
    if "file" not in lower or (targets is None and not names):
        raise DataError(
            f"{table}: the first line should be file,COLUMN,… or file,COLUMN,…,split, got {','.join(header)[:80]!r}"
        )
    wanted = [*names, *conditions]
    for i, name in enumerate(wanted):
        if name not in header:
            raise DataError(f"{table}: there is no column {name[:40]!r}; the columns are {listing(header)}")
        if name in wanted[:i] and name in conditions:
            raise DataError(f"{table}: the column {name!r} can't be a target and a condition")
    check_names(table, [name for name in header if name in wanted])
    split = [lower.index("split")] if "split" in lower else []
    return names, [lower.index("file"), *map(header.index, wanted), *split]


def _divided(root: Path, rows: list[Row], source: str, rule: Rule, kinds: list[str] | None = None) -> Division[Row]:
    """The rows of each part, by their own splits, or the folders of files in a table, else by `divide`."""
    of_table = rows[0].line > 0  # else folders are classes, which may be called train
    if of_table and not rows[0].split and (parts_of_rows := folder_parts([row.path for row in rows])):
        rows = [row._replace(split=part) for row, part in zip(rows, parts_of_rows, strict=True)]
        source = "by the folders of the meshes"
    if rows[0].split:
        check_fold(rule.fold, source)
        parts = Division(in_parts((row.split or "test", row) for row in rows), source)
        return parts.without(rule.without, lambda row: str(row.path))
    numbers = divide(root, [row.path for row in rows], rule, [row.name for row in rows], kinds)
    first: dict[int, Row] = {}
    for row in rows if numbers.source.startswith(AT_RANDOM) and rule.group_by is None else ():
        if row.line and (other := first.setdefault(row.line, row)) is not row:
            raise DataError(
                f"{root}: {other.name} and {row.name} are of one participant, and a random division would part them. "
                "Add --group-by with a pattern of the ids, such as '^[^/]+'"
            )
    return numbers.of(rows.__getitem__).without(rule.without, lambda row: str(row.path))


def _class_folders(root: Path, rule: Rule) -> _Rows:
    classes, meshes_of = folders_in(root), meshes_by(root, rule.files)
    if not classes:
        raise DataError(f"{root}: no classes found; expected one folder of meshes per class, or a table {CLASS_TABLE}")
    strays = _strays(root)
    above = {folder: told[0] for folder, told in part_folders(root, _has_classes).items()}
    if above and ({*rule.needed} <= {*above.values()} or len(above) == len(classes)):
        places = [(place, part) for folder, part in above.items() for place in folders_in(folder)]
        rows = [row for place, part in places for row in _class_rows(place, meshes_of(place), part)]
        strays += [text for folder in above for text in _strays(folder)]
        others = [folder.name for folder in classes if folder not in above]
        strays += [f"folders beside {listing(f.name for f in above)}: {listing(others)}"] if others else []
        return rows, f"by the folders {listing(folder.name for folder in above)}", strays
    rows = []
    source = ""
    for folder in classes:
        parts: dict[Path, Part | None] = {place: told[0] for place, told in part_folders(folder).items()}
        if parts:
            strays += _strays(folder)
            source = source or f"by the folders {listing(place.name for place in parts)} of each class"
        for place, part in (parts or {folder: None}).items():
            rows += _class_rows(folder, meshes_of(place), part)
            if bool(part) != bool(rows[0].split):
                first = root / rows[0].cells[0]
                with_split, without = (place.parent, first) if part else (first, place)
                raise DataError(
                    f"{with_split} has train/ or test/, and {without} has none: a set can have only one kind"
                )
    return rows, source, strays


def _has_classes(folder: Path) -> bool:
    """Whether a folder has folders of meshes that aren't parts of it."""
    return any(map(has_meshes, folders_in(folder))) and not part_folders(folder)


def _strays(folder: Path) -> list[str]:
    """What to say of meshes in a folder in which the subfolders have the meshes of the set."""
    strays = [mesh.name for mesh in meshes_in(folder)]
    return [f"meshes in {folder}, whose subfolders have the meshes of the set: {listing(strays)}"] if strays else []


def _class_rows(folder: Path, meshes: Sequence[Path], part: Part | None) -> list[Row]:
    """The meshes of a part of the class in a folder."""
    if not meshes:
        raise DataError(f"{folder}: no meshes ({', '.join(FORMATS)}, also with .gz) in this class")
    names = mesh_names(folder, meshes)
    return [
        Row(f"{folder.name}/{name}", mesh, [as_text(folder.name)], part)
        for name, mesh in zip(names, meshes, strict=True)
    ]


def _class_table(table: Path, rule: Rule, columns: Sequence[str]) -> _Rows:
    if columns:
        lines, _, _, others = _lines_of_columns(table, rule.files, columns, ())
        empty = [cells[0] for _, cells in lines if not cells[1]]
        lines = [line for line in lines if line[1][1]]
        others += [f"meshes without a label in the column {columns[0]!r}: {listing(empty)}"] * bool(empty)
    else:
        lines, others = _table_lines(table, rule.files)
    if lines and not columns and [cell.lower() for cell in lines[0][1]] in (_CLASSES, [*_CLASSES, "split"]):
        lines = lines[1:]
    for number, cells in lines:
        if len(cells) not in (2, 3) or not cells[0] or not cells[1]:
            raise DataError(
                f"{table}, line {number}: expected file,label or file,label,split; got {','.join(cells)[:80]!r}"
            )
    return _table_rows(table, lines, 1, rule.without), f"by the table {table.name}", others


def _table_lines(table: Path, pattern: str | None) -> tuple[list[_Line], list[str]]:
    """The lines of a table of meshes that aren't blank, with their numbers, and what is left out.

    A first column `participant_id` instead of `file`, as in BIDS, stands for all meshes of the participant below the
    folder of the table: those with the id in their paths. They get the same line, and n/a is an empty cell.

    pattern: of these meshes, see `meshes_by`

    Raises DataError for a participant without meshes.
    """
    lines = [line for line in table_lines(table) if any(line[1])]
    header = lines[0][1] if lines else []
    names = [name.lower() for name in header]
    if names[:1] != ["participant_id"] or "file" in names:
        return lines, []
    root, expanded = table.parent, [(lines[0][0], ["file", *header[1:]])]
    every = [mesh.relative_to(root).as_posix() for mesh in meshes_by(root, pattern)(root)]
    for number, (person, *cells) in lines[1:]:
        is_of = re.compile(rf"(?:^|.*/){re.escape(person)}(?![A-Za-z0-9])").match
        files = list(filter(is_of, every))
        if not files:
            raise DataError(f"{table}, line {number}: no mesh below {root} has {person!r} in its path")
        expanded += [(number, [file, *("" if cell == "n/a" else cell for cell in cells)]) for file in files]
    others = sorted({*every} - {cells[0] for _, cells in expanded})
    return expanded, [f"meshes of participants that are not in the table: {listing(others)}"] * bool(others)


def _table_rows(table: Path, lines: list[_Line], columns: int, without: Collection[str]) -> list[Row]:
    """The meshes of the lines of a table: a file, whose name is relative to the table, cells, and perhaps a split.

    columns: the number of cells between file and split. without: see `Rule`

    Raises DataError for a mesh that is missing or there twice, for a split that names no part, and if only some lines
    have one.
    """
    if not lines:
        raise DataError(f"{table}: there are no meshes in the table")
    seen: dict[Path, int] = {}
    rows: list[Row] = []
    for number, (file, *cells) in lines:
        place, path = f"{table}, line {number}", table.parent / file
        if not path.is_file() and str(path) not in without:
            raise DataError(f"{place}: {path}: no such file").about(path)
        if mesh_suffix(path) not in FORMATS:
            raise DataError(f"{place}: {file} is no mesh ({', '.join(FORMATS)}, also with .gz)")
        if (line := seen.setdefault(path.resolve(), number)) != number:
            raise DataError(f"{place}: {file} is in line {line}, too")
        split = "".join(cells[columns:])
        part, more = part_of(split) or (None, "")
        if split and (part is None or more):
            raise DataError(f"{place}: the split should be train, val or test, got {split[:40]!r}")
        rows.append(Row(file, path, cells[:columns], part, line=number))
        if bool(part) != bool(rows[0].split):
            raise DataError(f"{place}: either all lines or none should have a split")
    return rows
