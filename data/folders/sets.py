"""Data sets in folders: for segmentation, classification and regression, in memory or read when needed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from diffnet.data.conversion import with_labels_at
from diffnet.data.feature_names import (
    AUTO_LABELS,
    TABLE_PREFIX,
    TARGET_TABLE,
    checked_label_source,
    column_names,
    is_in_files,
    target_parts,
)
from diffnet.data.folders.division import Division, Rule, find_parts
from diffnet.data.folders.files import listing, mesh_names
from diffnet.data.folders.indexed import Index, IndexedDataset, Whole
from diffnet.data.folders.labels import Columns, Numbering, Pair, find_columns, find_elements, with_soft_labels
from diffnet.data.folders.layouts import Layout, find_files
from diffnet.data.folders.rows import CLASS_TABLE, Row, find_classes, find_target_rows, table_conditions, with_fields
from diffnet.data.folders.sources import colors_of_classes, find_values
from diffnet.data.labeled import DataError, LabeledMeshes, LabelsAt, PlaceAt, TargetsAt
from diffnet.data.numbers import check_names
from diffnet.data.shards.reading import ShardedDataset, labeled_shards
from diffnet.data.stored import remembered, some_of
from diffnet.geometry import Mesh, mesh_edges
from diffnet.geometry.mesh.content import VTK_FORMATS
from diffnet.geometry.mesh.mesh import mesh_suffix

_Files: TypeAlias = "Index | Whole"
_Path: TypeAlias = "str | os.PathLike[str]"
MIN_AGREEMENT = 0.1  # agreement above chance, as a share of the most that is possible
LOOKED_AT = 25  # meshes
MIN_DIFFERENT = 50.0  # neighbors with different labels that chance would give; fewer decide nothing


def load_dataset(
    path: str | os.PathLike[str],
    layout: Layout = "auto",
    *,
    labels: str = AUTO_LABELS,
    conditions: str | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    group_by: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    needs_train: bool = True,
    files: str | None = None,
    fold: tuple[int, int] | None = None,
    labels_at: LabelsAt | None = None,
) -> LabeledMeshes:
    """Read all of a labeled data set from a folder.

    layout: "rna" (Poulenard et al. 2019), "meshcnn" (Hanocka et al. 2019), "princeton" (Chen et al. 2009), "coseg"
        (Wang et al. 2012), "teeth" (Ben-Hamadou et al. 2022), or "folder", with labels in a file beside each mesh, in
        `labels/`, or in the meshes themselves. The page Segmentation of the documentation has the files of each layout.
        "auto" is the first of meshcnn, rna, coseg, princeton, folder and teeth whose files are there. Sets with the
        folders of "rna" whose listed names aren't PDB chains such as `1K73_B.off` are read as "folder".

    A folder or a URL of shards gives the set of `load_shards`, whose meshes are read when they are needed. A table
    (.csv or .tsv) has the columns `file`, `labels` with the label file of each mesh, and perhaps `split`, see
    `load_classes`.

    The folders `train/`, `test/` and `val/` divide the meshes. Without these, the lists `train.txt`, `test.txt` and
    `val.txt` do. Else a random share of `test_fraction`, drawn with `seed`, is the test part. It has at least one mesh.
    The page Features, augmentation and files says more.

    In "rna" there are always 260 classes, -1 to 258. Else numbers are any integers. Negative ones are unlabeled. The
    others, sorted, become classes 0 … C-1. `label_names` are the lines of `label_names.txt` if it exists, else the
    integers. If there are more lines than distinct integers, line i names the integer i, from 0. Named parts become
    classes in the order of `label_names.txt`, else of their names. The lines for colors are such as `#ff0000 arm`.
    Labels of faces may be one per polygon of the source file, or one per triangle.

    Meshes keep the order of the lists, else they are sorted by name (`a2` before `a10`). All files may be compressed by
    gzip (.gz).

    conditions: columns of a table with lines file,COLUMN,…, see `load_targets`: the path itself, or `labels.csv` in the
        folder
    labels: where the labels are, in the layout "folder".
        "auto": in a file beside each mesh, or in `labels/`; else in the mesh file: a property called label, class or
        such, the colors, or the only property with whole numbers. `labels_from` of the set names it.
        "file:NAME": in `STEM.NAME.npy`, `.txt` or `.csv`, as in `load_targets`, or the property NAME of the vertices or
        faces.
        Another name: the column of a table that has the label files, instead of `labels`. A table needs no such column
        for the sources above and below.
        "groups", "materials": the names of the groups (g) or materials (usemtl) of the faces of OBJ files
        "colors": the colors of vertices or faces
    files: a pattern such as "sub-*/surf/lh.pial" for the paths of the meshes in the folder. Without it, these are in
        the folder, in `off/`, `meshes/`, or in `train/` and `test/`; or in subfolders of any depth, if there are none.
        Meshes in further subfolders have names with their folders.
    group_by: a regular expression on the names of meshes. Its first group, or all that it matches, names the group of a
        mesh, and a random division leaves groups together. A name without a match is a group of its own.
    fold: (i, k) divides a set at random into k folds, of which the i-th, from 0, is the test part
    cache_dir: folder that keeps parsed meshes, see `load_mesh`
    needs_train: if False, as for an evaluation, the training part is empty. It may be missing: a folder with `test/` or
        `test.txt` alone. Without either, all meshes are the test part. Labels of the training part are read only if
        `label_names.txt` exists, because the names may count the values of the whole set.
    labels_at: convert the labels to "vertices", "edges" or "faces", see `diffnet.data.labels_at`. None leaves them.

    Warns if neighboring elements of a mesh have the same label hardly more often than by chance.

    Returns meshes with labels (V,), (F,) or (E,) int64. Raises DataError for a folder, file or label that is missing,
    malformed or contradictory, naming the file, for labels of the vertices of an STL file, which doesn't number them,
    and for a single class; and MeshError for a mesh that can't be read.
    """
    rule = Rule(test_fraction, seed, group_by, needs_train, files=files, fold=fold)
    data = _dataset(path, layout, labels, conditions, rule, Whole(cache_dir))
    return data if labels_at is None else with_labels_at(data, labels_at)


def load_classes(
    path: str | os.PathLike[str],
    *,
    labels: str = AUTO_LABELS,
    conditions: str | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    group_by: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    needs_train: bool = True,
    files: str | None = None,
    fold: tuple[int, int] | None = None,
) -> LabeledMeshes:
    """Read all of a data set for classification, in one of these layouts.

    - `CLASS/train/*` and `CLASS/test/*`, or `train/CLASS/*` and `test/CLASS/*`: meshes in one folder per class.
    - `CLASS/*`: the same without a split.
    - Shards, see `load_shards`. Their meshes are read when they are needed.
    - A table, `labels.csv` in the folder or the path itself: lines `file,label` or `file,label,split`, where the split
      is train, val or test. Files are relative to the table. A first line `file,label` or `file,label,split` is a
      header. In a `.tsv` file, tabs separate the cells. A first column `participant_id`, as in the `participants.tsv`
      of BIDS, stands for all meshes below the folder of the table with the id in their paths.

    Folders and lists are those of `load_dataset`. Else a random share of `test_fraction` of each class, drawn with
    `seed`, is the test part. It has at least one mesh of each class. Classes are sorted by name. Meshes beside the
    folders of classes belong to no class. They are not read, and `left_out` of the set names them.

    labels: the name of another column of a table
    conditions: columns of the table that are inputs, see `load_targets`
    group_by, files, fold: see `load_dataset`
    cache_dir: folder that keeps parsed meshes, see `load_mesh`
    needs_train: if False, as for an evaluation, the training part is not read, and it and some classes may be missing.
        Without a split, all meshes are the test part.

    Returns meshes with labels () int64. Raises DataError for a folder, file or line that is missing or malformed,
    naming it; for a single class; for a class without a training or test mesh; and MeshError for a mesh that can't be
    read.
    """
    rule = Rule(test_fraction, seed, group_by, needs_train, files=files, fold=fold)
    return _classes(path, labels, conditions, rule, Whole(cache_dir))


def load_targets(
    path: str | os.PathLike[str],
    targets: str | None = None,
    *,
    conditions: str | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    group_by: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    needs_train: bool = True,
    files: str | None = None,
    fold: tuple[int, int] | None = None,
) -> LabeledMeshes:
    """Read all of a data set for regression.

    targets: where they are, or the columns of the table, such as "drag,lift".
        "file:NAME", or several such parts joined by +: numbers at vertices, faces or edges. `path` is a folder, which
        is divided as `load_dataset` divides it. The numbers of a mesh STEM are in `STEM.NAME.npy`, `.txt` or `.csv`
        beside it; or in `NAME/STEM.npy`, `.txt` or `.csv`, where the folder NAME is beside the mesh or beside its
        folder; or they are the property NAME of the vertices or faces of a PLY or VTK file, or NAME_x, NAME_y and
        NAME_z, or NAME_0, NAME_1 and NAME_2. There are one or several columns, and a row for each element. The number
        of rows decides which elements these are. "vector:NAME" and "displacement:NAME" are three columns, and come
        first. "table:COLUMN" is a column of the table, and comes last.
        None: numbers for each mesh, in a table. `path` is the table, or a folder with `targets.csv`. The first line is
        `file,COLUMN,…` or `file,COLUMN,…,split`. For files and splits, see `load_classes`.
    conditions: columns of the table that are numbers of each mesh which a network gets, such as "speed,yaw". They are
        `conditions` of the meshes. With "file:NAME", `path` is the table, or the folder with it. If targets are named,
        other columns are ignored. A table may be a TSV file (.tsv). A condition of VTK files that is no column is a
        number in their field data, and they need no table.

    `path` may also be shards with targets, see `load_shards`. Their meshes are read when they are needed.

    NaN, and an empty cell of a table, is a missing target. Targets of faces may be one per polygon of the source file,
    or one per triangle.

    group_by, files, fold: see `load_dataset`
    cache_dir: folder that keeps parsed meshes, see `load_mesh`
    needs_train: if False, the training part may be missing, as for an evaluation, see `load_dataset`

    Returns meshes with labels (N, C) float64. `label_names` are the names of the columns. `labels_at` is "vertices",
    "faces", "edges" or "meshes". If columns are at several of these, it is a tuple with the place of each, and labels
    have rows for the vertices, the faces and the mesh, NaN in the columns of other places.

    Raises DataError for a folder, file or value that is missing, malformed or contradictory, naming the file, and for a
    column that is missing in all training meshes; OptionError for targets of another form; and MeshError for a mesh
    that can't be read.
    """
    rule = Rule(test_fraction, seed, group_by, needs_train, files=files, fold=fold)
    return _targets(path, targets, conditions, rule, Whole(cache_dir))


def index_dataset(
    path: str | os.PathLike[str],
    cache_dir: str | os.PathLike[str],
    layout: Layout = "auto",
    *,
    labels: str = AUTO_LABELS,
    conditions: str | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    group_by: str | None = None,
    needs_train: bool = True,
    files: str | None = None,
    fold: tuple[int, int] | None = None,
    without: Mapping[str, str] | None = None,
    jobs: int | None = None,
) -> IndexedDataset | ShardedDataset:
    """The data set that `load_dataset` reads, for sets that are larger than the memory: items are read when needed.

    `train`, `validation` and `test` are `IndexedMeshes`, or those whose labels are changed when they are read. The
    first call reads all files and stores an index in the cache folder: the numbers of vertices, faces and edges, which
    labels occur, and what each file is recognized by. Later calls read files that are new or have changed. Processes
    can share the folder.

    path, layout, labels, test_fraction, seed, group_by, needs_train, files, fold: see `load_dataset`, also for a
        warning. Shards give the set of `load_shards`.
    cache_dir: a folder for the index, parsed meshes and operators, see `precompute`. If it can't be written, there is a
        warning, and the next call reads all files again.
    without: meshes to leave out, as in `reasons` of an error. The others are divided as with these.
    jobs: number of worker processes that read files; by default one for each core. See `precompute_all` for calls from
        a script.

    Items are those of `load_dataset`. Raises DataError for the same faults as `load_dataset`, also for meshes that
    can't be read. The message names the files. What is known of the other files is stored first.
    """
    rule = Rule(test_fraction, seed, group_by, needs_train, files=files, fold=fold, without=without or {})
    return _dataset(path, layout, labels, conditions, rule, Index(Path(path), cache_dir, jobs))


def index_classes(
    path: str | os.PathLike[str],
    cache_dir: str | os.PathLike[str],
    *,
    labels: str = AUTO_LABELS,
    conditions: str | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    group_by: str | None = None,
    needs_train: bool = True,
    files: str | None = None,
    fold: tuple[int, int] | None = None,
    without: Mapping[str, str] | None = None,
    ignored: Collection[str] = (),
    jobs: int | None = None,
) -> IndexedDataset | ShardedDataset:
    """The data set for classification that `load_classes` reads, with items that are read when needed.

    ignored: names of classes that don't count, of which a part may have no mesh

    For other arguments and what is raised, see `load_classes` and `index_dataset`.
    """
    how: dict[str, Any] = {"fold": fold, "without": without or {}, "ignored": ignored}
    rule = Rule(test_fraction, seed, group_by, needs_train, files=files, **how)
    return _classes(path, labels, conditions, rule, Index(Path(path), cache_dir, jobs))


def index_targets(
    path: str | os.PathLike[str],
    cache_dir: str | os.PathLike[str],
    targets: str | None = None,
    *,
    conditions: str | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    group_by: str | None = None,
    needs_train: bool = True,
    files: str | None = None,
    fold: tuple[int, int] | None = None,
    without: Mapping[str, str] | None = None,
    jobs: int | None = None,
) -> IndexedDataset | ShardedDataset:
    """The data set for regression that `load_targets` reads, with items that are read when needed.

    For arguments and what is raised, see `load_targets` and `index_dataset`.
    """
    rule = Rule(test_fraction, seed, group_by, needs_train, files=files, fold=fold, without=without or {})
    return _targets(path, targets, conditions, rule, Index(Path(path), cache_dir, jobs))


def _dataset(path: _Path, layout: Layout, source: str, conditions: str | None, rule: Rule, files: _Files) -> Any:
    source, condition_names = checked_label_source(source), column_names("conditions", conditions)
    if shards := labeled_shards(path, files.cache_dir, rule.needs_train, condition_names):
        return shards
    root = Path(path)
    layout_files = find_files(root, layout, rule, source)
    parts, labels = layout_files.parts, layout_files.labels
    meshes = parts.every
    kind = "labels" if source == AUTO_LABELS else f"labels {source}"
    facts = files.facts({"mesh": meshes, kind: labels}, layout_files.at == "edges")
    values_of = {path: entry for path, (_, entry) in zip(labels, facts[kind], strict=True)}
    classes = layout_files.to_classes(values_of)
    inside = dict.fromkeys(values_of[mesh].kind for mesh in meshes if mesh in values_of)
    # Without the training part, its label files may still tell the classes.
    labels, facts[kind] = labels[-len(meshes) :], facts[kind][-len(meshes) :]
    kinds = {"mesh": meshes, kind: labels}
    at = find_elements(_pairs(kinds, facts), layout_files.at)
    if rule.needs_train and len(classes.names) == 1:
        only = f"{classes.names[0]!r} is the only class"
        raise DataError(f"{root}: {only}; segmentation needs at least 2. A negative label means unlabeled")
    rows = parts.of(lambda mesh: Row("", mesh, [], None))
    values = _conditions_of(_with_table(rows, root, rule, condition_names), condition_names, files)
    items = files.items(layout_files.names, kinds, facts, Numbering(classes.places, at, kind), values)
    fields = parts.fields(items) | {"label_names": classes.names, "label_numbers": classes.numbers}
    fields["label_colors"] = colors_of_classes(labels, classes.names)
    data = files.dataset(**fields, labels_at=at, labels_from=listing(inside), condition_names=tuple(condition_names))
    if layout_files.layout == "meshcnn" and (root / "sseg").is_dir():
        data = with_soft_labels(data, parts.parts["test"], root)
    warn_of_scattered_labels(data, root)
    return data


def _classes(path: _Path, labels: str, conditions: str | None, rule: Rule, files: _Files) -> Any:
    root, labels, condition_names = Path(path), checked_label_source(labels), column_names("conditions", conditions)
    if shards := labeled_shards(path, files.cache_dir, rule.needs_train, condition_names):
        return shards
    if is_in_files(labels):
        raise DataError(f"{path}: labels is {labels!r}, and classes need the name of a column of a table")
    has_conditions = condition_names and (root.is_file() or (root / CLASS_TABLE).is_file())
    columns = [labels] if labels != AUTO_LABELS else ["label"] if has_conditions else []
    parts, names = find_classes(root, rule, columns)
    parts = _with_table(parts, root, rule, condition_names)
    places = {name: i for i, name in enumerate(names)}
    classes = np.array([places[row.cells[0]] for row in parts.every], np.int64)
    fields = _of_rows(parts, classes, files, condition_names)
    return files.dataset(**fields, label_names=names, labels_at="meshes", condition_names=tuple(condition_names))


def _targets(path: _Path, targets: str | None, conditions: str | None, rule: Rule, files: _Files) -> Any:
    condition_names = column_names("conditions", conditions)
    if shards := labeled_shards(path, files.cache_dir, rule.needs_train, condition_names, "targets"):
        return shards
    root = Path(path)
    names = None if targets is None or not is_in_files(targets) else target_parts(targets)
    form = Columns(names or [], "vertices")
    of_table = [name.removeprefix(TABLE_PREFIX) for name in form.of_table]
    if names and not form.kinds:
        names, targets = None, ",".join(of_table)
    if not root.exists():
        raise DataError(f"{root}: no such folder or table")
    if names is not None and root.is_file() and mesh_suffix(root) not in (".csv", ".tsv"):
        raise DataError(f"{root}: a folder or a table is needed for the targets {targets}, and this is another file")
    at: TargetsAt = "meshes"
    if names is None:
        target_names = None if targets is None else column_names("targets", targets)
        rows, columns = find_target_rows(root, rule, target_names, condition_names)
        values = np.array([row.targets for row in rows.every])
        fields, present = _of_rows(rows, values[:, None], files, condition_names), ~np.isnan(values)
    else:
        rows = _table_meshes(root, rule, condition_names, of_table)
        meshes = [row.path for row in rows.every]
        kinds = {"mesh": meshes}
        kinds |= {kind: [find_values(mesh, kind.partition(" ")[2]) for mesh in meshes] for kind in form.kinds}
        facts = files.facts(kinds, edges=True)
        pairs = _pairs(kinds, facts)
        rows_of = [pairs[i :: len(meshes)] for i in range(len(meshes))]
        columns, places = find_columns(rows_of)
        whole: list[PlaceAt] = ["meshes"] * len(of_table)
        at = _place(root, [*places, *whole])
        check_names(root, columns := [*columns, *of_table])
        item_names = [row.name for row in rows.every]
        numbers = np.array([row.targets for row in rows.every], np.float64).reshape(len(meshes), -1)
        values = np.hstack([_conditions_of(rows, condition_names, files), numbers])
        items = files.items(item_names, kinds, facts, form._replace(at=at), values)
        fields = rows.fields(items)
        flags = np.array([[flag for pair in row for flag in pair.facts.distinct] for row in rows_of])
        present = np.hstack([flags, ~np.isnan(numbers)])
    missing = ~present[: len(fields["train"])].any(0)
    if rule.needs_train and missing.any():
        raise DataError(
            f"{root}: the column {columns[int(missing.argmax())]!r} is missing (NaN) in all training meshes"
        )
    return files.dataset(**fields, label_names=columns, labels_at=at, condition_names=tuple(condition_names))


def _place(root: Path, places: list[PlaceAt]) -> TargetsAt:
    """The one place of all columns, or that of each. Raises DataError for edges beside other places."""
    if len({*places}) > 1 and "edges" in places:
        raise DataError(f"{root}: targets at edges can't be learned together with those at other places")
    return places[0] if len({*places}) == 1 else tuple(places)


def _table_meshes(root: Path, rule: Rule, conditions: Sequence[str], targets: Sequence[str]) -> Division[Row]:
    """The meshes of each part in a folder, or of a table, which may be in the folder, with conditions and targets."""
    if root.is_file() or ((conditions or targets) and (root / TARGET_TABLE).is_file()):
        return find_target_rows(root, rule, targets, conditions)[0]
    parts = find_parts(root, rule)
    if targets or (conditions and not any(mesh_suffix(path) in VTK_FORMATS for path in parts.every)):
        return find_target_rows(root, rule, targets, conditions)[0]  # which says that there is no table
    parts = parts if rule.needs_train else parts.of_test()
    names = dict(zip(parts.every, mesh_names(root, parts.every), strict=True))
    return parts.of(lambda path: Row(names[path], path, [], None))


def _with_table(rows: Division[Row], root: Path, rule: Rule, names: Sequence[str]) -> Division[Row]:
    """The meshes of a set with labels, with those conditions that its table has."""
    table = root if root.is_file() else root / CLASS_TABLE
    if not names or not table.is_file():
        return rows
    by_path = table_conditions(table, rule, names)
    return rows.of(lambda row: row._replace(conditions=by_path.get(row.path.resolve(), {})))


def _conditions_of(rows: Division[Row], names: Sequence[str], files: _Files) -> NDArray[np.float64]:
    """(N, C), the conditions of all meshes, in their table or in their files."""
    are_missing = any(set(names) - row.conditions.keys() for row in rows.every)
    facts = files.facts({"fields": [row.path for row in rows.every]})["fields"] if are_missing else []
    fields = [each for _, each in facts] or [None] * len(rows.every)
    values = [
        [*with_fields(row.path, row.conditions, names, each).values()]
        for row, each in zip(rows.every, fields, strict=True)
    ]
    return np.array(values, np.float64).reshape(len(values), -1)


def _of_rows(
    parts: Division[Row], labels: NDArray[Any], files: _Files, conditions: Sequence[str] = ()
) -> dict[str, Any]:
    """The fields of a set whose meshes have these labels."""
    rows = parts.every
    kinds = {"mesh": [row.path for row in rows]}
    values = _conditions_of(parts, conditions, files)
    items = files.items([row.name for row in rows], kinds, files.facts(kinds), labels, values)
    return parts.fields(items)


def _pairs(kinds: dict[str, list[Path]], facts: dict[str, list[Any]]) -> list[Pair]:
    """Each mesh with each file of its labels or targets."""
    meshes = [(path, sizes) for path, (_, sizes) in zip(kinds["mesh"], facts["mesh"], strict=True)]
    return [
        Pair(*mesh, file, values)
        for kind, paths in kinds.items()
        if kind != "mesh"
        for mesh, file, (_, values) in zip(meshes, paths, facts[kind], strict=True)
    ]


class Agreement(NamedTuple):
    """The labels of neighboring elements of a mesh.

    pairs: the number of neighbors that both have a label
    share: the share of these with the same label
    chance: this share for the same labels in random order
    """

    pairs: int
    share: float
    chance: float

    @property
    def is_chance(self) -> bool:
        """Whether neighbors agree hardly more often than by chance."""
        differ = 1 - self.chance
        return self.pairs * differ >= MIN_DIFFERENT and self.share - self.chance < MIN_AGREEMENT * differ


def agreement(mesh: Mesh, labels: NDArray[np.int64], at: LabelsAt) -> Agreement:
    """How often neighbors have the same label. Vertices are neighbors along sides of faces, others if they share one.

    labels: (V,), (F,) or (E,), negative where unlabeled

    Not all neighbors are counted: each face or edge at a vertex is compared with one of them.
    """
    if at == "vertices":
        pairs = mesh.faces[:, [0, 1, 1, 2, 2, 0]].reshape(-1, 2)
    else:
        rows = mesh.faces if at == "faces" else mesh_edges(mesh.faces)
        corners, owner = rows.reshape(-1), np.repeat(np.arange(len(rows)), rows.shape[1])
        one = np.zeros(len(mesh.verts), np.int64)
        one[corners] = owner  # the last write to a vertex wins
        pairs = np.stack([owner, one[corners]], 1)
    classes = labels[pairs[pairs[:, 0] != pairs[:, 1]]]
    classes = classes[(classes >= 0).all(1)]
    if not len(classes):
        return Agreement(0, 1.0, 1.0)
    frequencies = np.bincount(classes.reshape(-1)) / classes.size
    return Agreement(len(classes), float((classes[:, 0] == classes[:, 1]).mean()), float(frequencies @ frequencies))


def warn_of_scattered_labels(data: LabeledMeshes, root: Path) -> None:
    """Warn once of meshes whose neighboring elements agree hardly more often than by chance.

    Of large sets, up to LOOKED_AT meshes of each part are looked at. The cache remembers those of stored sets.
    """
    at = cast(LabelsAt, data.labels_at)
    shuffled, count = [], 0
    for part in (data.train, data.validation, data.test):
        items = some_of(part, LOOKED_AT)
        rows = remembered(lambda item: agreement(item.mesh, item.labels, at), items, "agreement", at, jobs=1)
        each = enumerate(Agreement(*row) for row in rows)
        shuffled += [(items[i].mesh.name, numbers) for i, numbers in each if numbers.is_chance]
        count += len(items)
    if shuffled:
        name, numbers = shuffled[0]
        share, chance = (f"{100 * value:.1f} %" for value in (numbers.share, numbers.chance))
        warnings.warn(
            f"{root}: the labels of {len(shuffled)} of {count} meshes look shuffled. In {name}, {share} of "
            f"neighboring {at} have the same label, and {chance} would by chance. Labels should be in the "
            f"order of the {at} in the mesh file",
            stacklevel=4,
        )
