"""Sets of pairs on disk: their meshes, lists of pairs, and files of vertex indices."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, permutations
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from diffnet.data.folders.division import AT_RANDOM, Rule, find_parts, has_set, lists_in
from diffnet.data.folders.files import PARTS, files_in, folders_in, listing, meshes_in
from diffnet.data.labeled import DataError, counted
from diffnet.data.numbers import check_vertex_numbers, read_labels, read_lines
from diffnet.data.options import Base
from diffnet.data.pairs.shapes import MeshPairs, Pair, PairShape, check_whole
from diffnet.geometry import load_mesh
from diffnet.geometry.mesh.mesh import mesh_stem

RULES = ("all", "within", "across")
PLACES = ("corres", "maps", "points")  # folders of correspondences, beside those of the meshes
_MAPS = (".txt", ".map")
_NAMED = ("pairs.txt", "train.txt", "test.txt", "readme.txt", "license.txt")

Ints: TypeAlias = NDArray[np.int64]
Reader: TypeAlias = "Callable[[Sequence[IndexFile]], list[Ints]]"


def load_pairs(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    pairs: str | os.PathLike[str] | None = None,
    *,
    base: Base = "auto",
    test_fraction: float = 0.2,
    seed: int = 0,
    group_by: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    needs_train: bool = True,
    partial_shapes: bool = False,
) -> MeshPairs:
    """Read a set of meshes in pairs, from one or several folders.

    path: a folder of meshes, several of them, or a folder whose subfolders hold meshes, which count as several.
        Folders or lists for training and testing divide the meshes of each as in `load_dataset`. Else the meshes in a
        list of pairs are for testing. Else a random share of `test_fraction`, drawn with `seed`, is for testing: at
        least two of four or more meshes. Meshes for validation are left out.
    pairs: which meshes form pairs, each pair once: "all"; "within": both in one folder; "across": in two folders; or
        the path of a file with the names of two meshes in each line. By default `pairs.txt` or `test_pairs.txt` in the
        folder, else "all".
        A list that names no training pairs leaves all of them.
    group_by: see `load_dataset`. In several folders, each is divided by itself.
    base: "0" or "1", the number of the first vertex in files of indices. "auto" finds it, see `read_indices`.
    cache_dir: folder that keeps parsed meshes, see `load_mesh`
    needs_train: if False, the training part may be missing, as for an evaluation. Without a division, all meshes are
        for testing.
    partial_shapes: whether shapes may be partial. Then a negative index, or nan, marks a point that a mesh lacks.

    Correspondences are in `corres/`, `maps/` or `points/` in the folder, or beside the meshes. The set may have none.

    - `NAME.vts` for each mesh: the vertex at each template point, one in each line, as published with the remeshed
      sets FAUST and SCAPE (Ren et al. 2018). `mirror.txt` in the folder may hold, for each template point, the one on
      the other side of the body, in the same form.
    - `A_B.txt`, `A-B.txt`, `A_B.map` or `A-B.map`: for each vertex of A, a vertex of B. Pairs without a map are left
      out.

    In several folders, a mesh is called `FOLDER/NAME`, and each folder may have template points of its own if all pairs
    are within folders.

    Raises DataError for a folder or file that is missing, malformed or contradictory, for an index out of range, for
    missing points without `partial_shapes`, for vertices of an STL file, which doesn't number them, and
    for a part without pairs. The message names the file.
    Raises MeshError for a mesh that can't be read, and without `partial_shapes` for a partial shape in a pair with a
    whole one, if they have no template points.
    """
    if base not in ("auto", "0", "1"):
        raise DataError(f"base should be auto, 0 or 1, got {base!r}")
    rule = Rule(test_fraction, seed, group_by, needs_train, min_tests=2)
    folders = [path] if isinstance(path, (str, os.PathLike)) else list(path)
    roots = [root for folder in folders for root in _roots(Path(folder))]
    which = _pair_rule(folders, pairs)
    divisions = [
        find_parts(root, rule, meshes_in).of(partial(_shape, root=root, several=len(roots) > 1, cache_dir=cache_dir))
        for root in roots
    ]
    train, held_out, test = ([shape for one in divisions for shape in one.parts[part]] for part in PARTS)
    sources = {one.source: root.name for root, one in zip(roots, divisions, strict=True)}
    source = "; ".join(sources if len(sources) == 1 else (f"{root} {text}" for text, root in sources.items()))
    if which not in RULES and all(text.startswith(AT_RANDOM) for text in sources):
        shapes = sorted(train + test, key=lambda shape: shape.name)  # in an order that the seed doesn't change
        places = {shape.name: i for i, shape in enumerate(shapes)}
        numbers = {_find(places, name) for _, names in _lines(Path(which)) for name in names}
        train, test = ([shape for i, shape in enumerate(shapes) if (i in numbers) == tests] for tests in (False, True))
        source = f"by {Path(which).name}, whose meshes are for testing"
    left_out = [text for one in divisions for text in one.left_out]
    if held_out:
        left_out.append(f"meshes for validation, which pairs don't have: {listing(s.name for s in held_out)}")
    data = MeshPairs(train, test, [], [], source=source, left_out=tuple(left_out))
    read = partial(read_indices, base=base, partial_shapes=partial_shapes)
    data = _with_pairs(_with_correspondences(data, roots, read), folders, which, needs_train)
    if partial_shapes:
        return data
    # A shape with a place for every template point is whole.
    for shapes, part_pairs in ((data.train, data.train_pairs), (data.test, data.test_pairs)):
        check_whole([(shapes[i].mesh, shapes[j].mesh) for i, j in part_pairs if shapes[i].template is None])
    return data


def _roots(folder: Path) -> list[Path]:
    """The folder itself, or its subfolders if the meshes are there."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    if has_set(folder):
        return [folder]
    below = list(filter(has_set, folders_in(folder)))
    if lists := lists_in(folder, set()):
        names = listing(file.name for file in lists)
        raise DataError(f"{folder}: {names} can't divide meshes of subfolders. Put lists into each of them")
    if not below:
        raise DataError(f"{folder}: no meshes found here, in off/, meshes/, train/ or test/, or in subfolders")
    return below


def _shape(file: Path, root: Path, several: bool, cache_dir: str | os.PathLike[str] | None) -> PairShape:
    name = f"{root.name}/{mesh_stem(file)}" if several else mesh_stem(file)
    return PairShape(name, load_mesh(file, cache_dir), None, str(root))


def _with_correspondences(data: MeshPairs, roots: Sequence[Path], read: Reader) -> MeshPairs:
    shapes = data.train + data.test
    twice = next((name for name, count in Counter(shape.name for shape in shapes).items() if count > 1), None)
    if twice is not None:
        raise DataError(f"{roots[-1]}: {twice!r} occurs twice. Folders of a set should have different names")
    files = {shape.name: file for shape in shapes if (file := _template_file(shape))}
    if not files:
        return replace(data, maps=_read_maps(data, read))
    for shape in shapes:
        if shape.name not in files:
            raise DataError(f"{shape.mesh.name}: there is no {mesh_stem(shape.mesh.name)}.vts; other meshes have one")
    return _with_vertices(data, [*files.values()], roots, read)


def _template_file(shape: PairShape) -> Path | None:
    """The file with the vertices of a mesh at the template points."""
    mesh, root = Path(shape.mesh.name), Path(shape.folder)
    folders = mesh.parent, *(place / name for place in (root, mesh.parent) for name in PLACES)
    return next((f for f in (folder / f"{mesh_stem(mesh)}.vts" for folder in folders) if f.is_file()), None)


def _with_vertices(data: MeshPairs, files: Sequence[Path], roots: Sequence[Path], read: Reader) -> MeshPairs:
    """The files of one folder start at the same number, and have the same number of template points."""
    shapes = data.train + data.test
    for root in roots:
        members = [i for i, shape in enumerate(shapes) if shape.folder == str(root)]
        for i in members:
            check_vertex_numbers(shapes[i].mesh, files[i])
        templates = read([IndexFile(files[i], len(shapes[i].mesh.verts), shapes[i].mesh.name) for i in members])
        for i, template in zip(members, templates, strict=True):
            if len(template) != len(templates[0]):
                raise DataError(
                    f"{files[i]}: {len(template)} template points, but {files[members[0]]} has {len(templates[0])}. "
                    "All meshes of a set should have the same"
                )
            shapes[i] = replace(shapes[i], template=template)
    counts = {_count(shape) for shape in shapes}
    mirror = _read_mirror(roots, counts.pop()) if len(counts) == 1 else None
    count = len(data.train)
    return replace(data, train=shapes[:count], test=shapes[count:], mirror=mirror)


def _count(shape: PairShape) -> int:
    return 0 if shape.template is None else len(shape.template)


def _read_mirror(roots: Sequence[Path], count: int) -> Ints | None:
    path = next((root / "mirror.txt" for root in roots if (root / "mirror.txt").is_file()), None)
    if path is None:
        return None
    partners = read_indices([IndexFile(path, count, "the template")])[0]
    if len(partners) != count:
        raise DataError(f"{path}: {len(partners)} mirror images, but there are {count} template points")
    return partners


def _read_maps(data: MeshPairs, read: Reader) -> dict[tuple[str, str], Ints]:
    """The point-to-point maps between meshes of one part."""
    by_stem: dict[str, dict[str, Path]] = {}
    beside = {Path(shape.mesh.name).parent for shape in data.train + data.test}
    for folder in dict.fromkeys(shape.folder for shape in data.train + data.test):
        places = sorted({*(Path(folder) / place for place in PLACES), *beside})
        by_stem[folder] = {file.stem: file for place in places for file in files_in(place, _MAPS, _NAMED)}
    if not any(by_stem.values()):
        return {}  # without looking at each pair: large sets have very many
    pairs: dict[tuple[str, str], tuple[Path, PairShape, PairShape]] = {}
    for shapes in (data.train, data.test):
        for first, second in permutations(shapes, 2):
            names = mesh_stem(first.mesh.name), mesh_stem(second.mesh.name)
            file = by_stem[first.folder].get("_".join(names)) or by_stem[first.folder].get("-".join(names))
            if file is not None:
                pairs[first.name, second.name] = file, first, second
    if not pairs:
        return {}
    for file, first, second in pairs.values():
        check_vertex_numbers(first.mesh, file)
        check_vertex_numbers(second.mesh, file)
    sides = [IndexFile(file, len(second.mesh.verts), second.mesh.name) for file, _, second in pairs.values()]
    maps = read(sides)
    for vertices, (file, first, _) in zip(maps, pairs.values(), strict=True):
        if len(vertices) != len(first.mesh.verts):
            raise DataError(
                f"{file}: {len(vertices)} entries, but {first.mesh.name} has {len(first.mesh.verts)} vertices"
            )
    return dict(zip(pairs, maps, strict=True))


def _pair_rule(folders: Sequence[str | os.PathLike[str]], rule: str | os.PathLike[str] | None) -> str:
    """One of RULES, or the path of a list of pairs. folders: those of the set"""
    if rule is None:
        places = [Path(folders[0], name) for name in ("pairs.txt", "test_pairs.txt")] if len(folders) == 1 else []
        return str(next((place for place in places if place.is_file()), "all"))
    if rule not in RULES and not Path(rule).is_file():
        raise DataError(f"{rule}: pairs should be one of {', '.join(RULES)}, or a file with two names in each line")
    return os.fspath(rule)


def _with_pairs(data: MeshPairs, folders: Sequence[str | os.PathLike[str]], rule: str, needs_train: bool) -> MeshPairs:
    is_list = rule not in RULES
    parts: dict[str, list[Pair]] = {}
    for part, shapes, others in (("train", data.train, data.test), ("test", data.test, data.train)):
        pairs = _listed_pairs(shapes, others, Path(rule)) if is_list else []
        for i, j in pairs:
            if data.maps and (shapes[i].name, shapes[j].name) not in data.maps:
                raise DataError(f"{rule}: there is no map from {shapes[i].name} to {shapes[j].name}")
        if not is_list or (not pairs and part == "train"):
            pairs = _pairs_by(data, shapes, "all" if is_list else rule)
        if not pairs and (needs_train or part == "test"):
            raise DataError(
                f"{folders[0]}: there are no pairs ({rule}) of {part} meshes. This part has "
                f"{counted(len(shapes), 'mesh', 'meshes')}; train.txt and test.txt, or folders of these names, set it"
            )
        for first, second in ((shapes[i], shapes[j]) for i, j in pairs):
            if _count(first) != _count(second):
                raise DataError(
                    f"{first.mesh.name} has {_count(first)} template points, but {second.mesh.name} has "
                    f"{_count(second)}, so they are no pair. Take pairs within folders"
                )
        parts[part] = pairs
    return replace(data, train_pairs=parts["train"], test_pairs=parts["test"])


def _pairs_by(data: MeshPairs, shapes: list[PairShape], rule: str) -> list[Pair]:
    """The pairs of meshes by one of RULES, each once, the earlier mesh first.

    If the set has maps, these are the pairs that have one, in its direction.
    """
    numbers = combinations(range(len(shapes)), 2)
    pairs = (
        (i, j) for i, j in numbers if rule == "all" or (shapes[i].folder == shapes[j].folder) == (rule == "within")
    )
    if not data.maps:
        return list(pairs)
    names = [shape.name for shape in shapes]
    ways = (next((p for p in ((i, j), (j, i)) if (names[p[0]], names[p[1]]) in data.maps), None) for i, j in pairs)
    return [way for way in ways if way is not None]


def _listed_pairs(shapes: Sequence[PairShape], others: Sequence[PairShape], path: Path) -> list[Pair]:
    """The pairs of a list file, in its order. others: the meshes of the other part, whose pairs are left out

    Raises DataError for an unknown name, and for a pair of a training and a test mesh. The message names the line.
    """
    places = {shape.name: i for i, shape in enumerate([*shapes, *others])}
    pairs = []
    for number, names in _lines(path):
        pair = []
        for name in names:
            place = _find(places, name)
            if place is None:
                raise DataError(f"{path}, line {number}: there is no mesh {name[:60]!r}")
            pair.append(place)
        i, j = pair
        if (i < len(shapes)) != (j < len(shapes)):
            raise DataError(f"{path}, line {number}: one of {names[0]} and {names[1]} is for training, one for testing")
        if i < len(shapes):
            pairs.append((i, j))
    return pairs


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The two names in each line of a list file, separated by blanks or a comma, with the number of the line from 1."""
    for number, line in enumerate(read_lines(path), 1):
        names = line.replace(",", " ").split()
        if len(names) != 2:
            raise DataError(f"{path}, line {number}: expected the names of two meshes, got {line[:60]!r}")
        yield number, names


def _find(places: dict[str, int], name: str) -> int | None:
    """The place of the mesh of a name, or of a name with an extension."""
    return places.get(name, places.get((Path(name).parent / mesh_stem(name)).as_posix()))


class IndexFile(NamedTuple):
    """A file of vertex indices.

    path: the file
    vertices: the number of vertices of the mesh that the indices belong to
    name: of this mesh, for messages
    """

    path: Path
    vertices: int
    name: str


def read_indices(files: Sequence[IndexFile], base: Base = "auto", partial_shapes: bool = False) -> list[Ints]:
    """The indices (N,) in each file of a set, counted from 0, with −1 for a missing point.

    base: the number of the first vertex, "0" or "1". All files of a set have the same. "auto" finds it: an index 0
        means 0, and an index equal to the number of vertices means 1.

    Raises DataError for a file that is missing or holds anything but whole numbers; for an index out of range; for a
    negative index, which marks a missing point, without `partial_shapes`; for files that contradict each other; and if
    "auto" fits both.
    """
    values = [read_labels(file.path) for file in files]
    for file, array in zip(files, values, strict=True):
        if not partial_shapes and len(missing := np.flatnonzero(array < 0)):
            raise DataError(
                f"{file.path}: entry {missing[0] + 1} is {array[missing[0]]}, which marks a missing point, as on a "
                "partial shape. Partial shapes are not supported without --partial: every point needs a vertex"
            )
    first = _first_number(files, values) if base == "auto" else int(base)
    for file, array in zip(files, values, strict=True):
        outside = np.flatnonzero(((array >= 0) & (array < first)) | (array >= file.vertices + first))
        if len(outside):
            raise DataError(
                f"{file.path}: entry {outside[0] + 1} is {array[outside[0]]}, but the vertices of {file.name} are "
                f"numbered from {first} to {file.vertices + first - 1}"
            )
    return [np.where(array < 0, -1, array - first) for array in values]


def _first_number(files: Sequence[IndexFile], values: Sequence[Ints]) -> int:
    zero = next((file for file, array in zip(files, values, strict=True) if (array == 0).any()), None)
    one = next((file for file, array in zip(files, values, strict=True) if array.max() == file.vertices), None)
    for file, array in zip(files, values, strict=True):
        if array.max() > file.vertices:
            raise DataError(
                f"{file.path}: entry {array.argmax() + 1} is {array.max()}, but {file.name} has {file.vertices} "
                "vertices"
            )
    if zero is not None and one is not None:
        raise DataError(
            f"{zero.path} has the index 0, but {one.path} has the index {one.vertices}, and {one.name} has "
            f"{one.vertices} vertices: all files should count from 0, or all from 1. If 0 marks missing points, the "
            "shape is partial, which is not supported"
        )
    if zero is None and one is None:
        raise DataError(
            f"{files[0].path}: the indices could count from 0 or from 1: no file of the set has the index 0, or the "
            "number of vertices of its mesh. Say which: base 0 or 1"
        )
    return 0 if one is None else 1
