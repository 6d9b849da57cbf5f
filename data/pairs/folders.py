"""Sets of pairs on disk: their meshes, lists of pairs, and files of vertex indices."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import numpy as np

from diffnet.data.folders.division import AT_RANDOM, Division, Rule, divided, find_parts, has_set, lists_in
from diffnet.data.folders.files import MESH_FOLDERS, PARTS, files_in, folders_in, has_meshes, listing, meshes_in
from diffnet.data.labeled import DataError, counted
from diffnet.data.numbers import check_vertex_numbers
from diffnet.data.options import Base
from diffnet.data.pairs.files import MAP_FORMATS, IndexFile, pair_lines, read_indices, read_maps
from diffnet.data.pairs.shapes import Ints, MeshPairs, Pair, PairShape, check_whole
from diffnet.geometry import load_mesh
from diffnet.geometry.mesh.mesh import mesh_stem

RULES = ("all", "within", "across")
PLACES = ("corres", "maps", "points")  # folders of correspondences, beside those of the meshes
BETWEEN = "cross_category_corres"  # the folder of those between classes, in one of them or beside it
_NAMED = ("pairs.txt", "train.txt", "test.txt", "readme.txt", "license.txt")


def load_pairs(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    pairs: str | os.PathLike[str] | None = None,
    *,
    base: Base = "auto",
    registered: bool = False,
    test_fraction: float = 0.2,
    seed: int = 0,
    group_by: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    needs_train: bool = True,
    partial_shapes: bool = False,
    fold: tuple[int, int] | None = None,
    without: Mapping[str, str] | None = None,
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
    group_by, fold: see `load_dataset`. In several folders, each is divided by itself.
    base: "0" or "1", the number of the first vertex in files of indices. "auto" finds it, see `read_indices`.
    registered: whether vertices of one number correspond, in meshes with the same faces. No file is needed then.
    cache_dir: folder that keeps parsed meshes, see `load_mesh`
    needs_train: if False, the training part may be missing, as for an evaluation. Without a division, all meshes are
        for testing.
    partial_shapes: whether shapes may be partial. Then a negative index, or nan, marks a point that a mesh lacks.
    without: see `index_dataset`

    Correspondences are in `corres/`, `maps/` or `points/` in the folder, or beside the meshes. The set may have none.

    - `NAME.vts` for each mesh: the vertex at each template point, one in each line, as published with the remeshed
      sets FAUST and SCAPE (Ren et al. 2018). `mirror.txt` in the folder may hold, for each template point, the one on
      the other side of the body, in the same form, or `NAME.sym.vts` for each mesh the vertex there.
    - `A_B.txt` or `A-B.txt`, also `.map`, `.csv` and `.npy`: for each vertex of A, a vertex of B. Pairs without a map
      are left out.

    In several folders, a mesh is called `FOLDER/NAME`, and each folder may have template points of its own if all pairs
    are within folders. Such folders may also be `off/CLASS/`, with correspondences in `corres/CLASS/`, as those of
    DT4D-H (Magnet et al. 2022). Lists of that set name `CLASS/NAME`. Its files `corres/cross_category_corres/A_B.vts`
    hold, for each template point of class A, one of class B. Pairs of classes without a file are left out.

    Raises DataError for a folder or file that is missing, malformed or contradictory, for an index out of range, for
    missing points without `partial_shapes`, for vertices of an STL file, which doesn't number them, and
    for a part without pairs. The message names the file.
    Raises MeshError for a mesh that can't be read, and without `partial_shapes` for a partial shape in a pair with a
    whole one, if they have no template points.
    """
    if base not in ("auto", "0", "1"):
        raise DataError(f"base should be auto, 0 or 1, got {base!r}")
    rule = Rule(test_fraction, seed, group_by, needs_train, min_tests=2, fold=fold, without=without or {})
    folders = [path] if isinstance(path, (str, os.PathLike)) else list(path)
    roots = [root for folder in folders for root in _roots(Path(folder))]
    which = _pair_rule(folders, pairs)
    parts = [_division(root, rule) for root in roots]
    homes = list(dict.fromkeys(home for one in parts for _, home in one.every))
    divisions = [one.of(partial(_shape, several=len(homes) > 1, cache_dir=cache_dir)) for one in parts]
    train, held_out, test = ([shape for one in divisions for shape in one.parts[part]] for part in PARTS)
    sources = {one.source: root.name for root, one in zip(roots, divisions, strict=True)}
    source = "; ".join(sources if len(sources) == 1 else (f"{root} {text}" for text, root in sources.items()))
    if which not in RULES and all(text.startswith(AT_RANDOM) for text in sources):
        shapes = sorted(train + test, key=lambda shape: shape.name)  # in an order that the seed doesn't change
        places = {shape.name: i for i, shape in enumerate(shapes)}
        numbers = {_find(places, name) for _, names in pair_lines(Path(which)) for name in names}
        train, test = ([shape for i, shape in enumerate(shapes) if (i in numbers) == tests] for tests in (False, True))
        source = f"by {Path(which).name}, whose meshes are for testing"
    left_out = [text for one in divisions for text in one.left_out]
    if held_out:
        left_out.append(f"meshes for validation, which pairs don't have: {listing(s.name for s in held_out)}")
    data = MeshPairs(train, test, [], [], source=source, left_out=tuple(left_out))
    how: dict[str, Any] = {"base": base, "needs_all": not partial_shapes}
    data = _registered(data) if registered else _with_correspondences(data, homes, how)
    data = _with_pairs(data, folders, which, rule)
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
    if has_set(folder) or _classes(folder):
        return [folder]
    below = list(filter(has_set, folders_in(folder)))
    if lists := lists_in(folder, set()):
        names = listing(file.name for file in lists)
        raise DataError(f"{folder}: {names} can't divide meshes of subfolders. Put lists into each of them")
    if not below:
        raise DataError(f"{folder}: no meshes found here, in off/, meshes/, train/ or test/, or in subfolders")
    return below


def _classes(root: Path) -> list[Path]:
    """The folders `off/CLASS` of a set whose meshes are there."""
    return [folder for name in MESH_FOLDERS[1:] for folder in folders_in(root / name) if has_meshes(folder)]


def _division(root: Path, rule: Rule) -> Division[tuple[Path, Path]]:
    """The meshes of each part, with the folders that they count to. Lists of a set with classes name `CLASS/NAME`."""
    if has_set(root):
        return find_parts(root, rule, meshes_in).of(lambda mesh: (mesh, root))
    meshes = [mesh for folder in _classes(root) for mesh in meshes_in(folder)]
    names = [f"{mesh.parent.name}/{mesh_stem(mesh)}" for mesh in meshes]
    return divided(root, meshes, rule, names).of(lambda mesh: (mesh, mesh.parent))


def _shape(mesh_and_folder: tuple[Path, Path], several: bool, cache_dir: str | os.PathLike[str] | None) -> PairShape:
    file, folder = mesh_and_folder
    name = f"{folder.name}/{mesh_stem(file)}" if several else mesh_stem(file)
    return PairShape(name, load_mesh(file, cache_dir), None, str(folder))


def _registered(data: MeshPairs) -> MeshPairs:
    """Each vertex is a template point. Raises DataError for other faces."""
    every = [shape.mesh for shape in data.train + data.test]
    for mesh in every:
        if mesh.verts.shape != every[0].verts.shape or not np.array_equal(mesh.faces, every[0].faces):
            raise DataError(f"{mesh.name}: registered meshes should have the faces of {every[0].name}")
    train, test = (
        [replace(s, template=np.arange(len(s.mesh.verts))) for s in part] for part in (data.train, data.test)
    )
    return replace(data, train=train, test=test)


def _with_correspondences(data: MeshPairs, roots: Sequence[Path], how: dict[str, Any]) -> MeshPairs:
    """how: see `read_indices`"""
    shapes = data.train + data.test
    twice = next((name for name, count in Counter(shape.name for shape in shapes).items() if count > 1), None)
    if twice is not None:
        raise DataError(f"{roots[-1]}: {twice!r} occurs twice. Folders of a set should have different names")
    files = _template_files(shapes, ".vts")
    return _with_vertices(data, files, roots, how) if files else replace(data, maps=_read_maps(data, how))


def _template_files(shapes: Sequence[PairShape], suffix: str) -> dict[str, Path]:
    """The files with a vertex of each mesh for each template point, by the names of the meshes. Empty if none has one.

    Raises DataError for a mesh without one, if others have one, and for vertices of an STL file.
    """
    files: dict[str, Path] = {}
    for shape in shapes:
        mesh, root = Path(shape.mesh.name), Path(shape.folder)
        folders = [mesh.parent, *(place / name for place in (root, mesh.parent) for name in PLACES)]
        folders += [root.parent.parent / name / root.name for name in PLACES]  # beside `off/CLASS`
        places = (folder / f"{mesh_stem(mesh)}{suffix}" for folder in folders)
        if file := next(filter(Path.is_file, places), None):
            check_vertex_numbers(shape.mesh, file)
            files[shape.name] = file
    missing = next((shape.mesh.name for shape in shapes if shape.name not in files), None)
    if files and missing is not None:
        others = counted(len(files), "other mesh has", "other meshes have")
        raise DataError(f"{missing}: there is no {mesh_stem(missing)}{suffix}; {others} one")
    return files


def _with_vertices(data: MeshPairs, files: dict[str, Path], roots: Sequence[Path], how: dict[str, Any]) -> MeshPairs:
    """The files of one folder start at the same number, and have the same number of template points."""
    shapes = {shape.name: shape for shape in data.train + data.test}
    for root in roots:
        members = [shape for shape in shapes.values() if shape.folder == str(root)]
        fields = {"template": files, "mirrored": _template_files(members, ".sym.vts")}
        sources = [(s, field, of[s.name]) for field, of in fields.items() for s in members if of]
        indices = [IndexFile(file, len(s.mesh.verts), s.mesh.name) for s, _, file in sources]
        templates = read_indices(indices, **how)
        for (shape, field, file), template in zip(sources, templates, strict=True):
            if len(template) != len(templates[0]):
                raise DataError(
                    f"{file}: {len(template)} template points, but {sources[0][2]} has {len(templates[0])}. "
                    "All meshes of a set should have the same"
                )
            values: dict[str, Any] = {field: template}
            shapes[shape.name] = replace(shapes[shape.name], **values)
    between = _read_between(shapes, files, roots, how)
    every, count = _with_mirror_images([*shapes.values()], roots), len(data.train)
    return replace(data, train=every[:count], test=every[count:], between=between)


def _read_between(
    shapes: dict[str, PairShape], files: dict[str, Path], roots: Sequence[Path], how: dict[str, Any]
) -> dict[tuple[str, str], Ints]:
    """For each template point of a class, that of another class. All files start at the same number.

    Raises DataError for a missing point, because templates are whole.
    """
    counts = {shape.folder: _count(shape) for shape in shapes.values()}
    pairs: dict[tuple[str, str], Path] = {}
    for a, b in permutations(roots, 2):
        above = b.parent.parent
        places = (place / BETWEEN / f"{a.name}_{b.name}.vts" for place in (above, *(above / name for name in PLACES)))
        if a.parent == b.parent and (file := next(filter(Path.is_file, places), None)) is not None:
            pairs[str(a), str(b)] = file
    if not pairs:
        return {}
    every = [IndexFile(files[name], len(shape.mesh.verts), shape.mesh.name) for name, shape in shapes.items()]
    every += [IndexFile(file, counts[b], f"the template of {Path(b).name}") for (_, b), file in pairs.items()]
    points = read_indices(every, **how)[len(shapes) :]
    for (key, file), numbers in zip(pairs.items(), points, strict=True):
        if (numbers < 0).any():
            raise DataError(f"{file}: a point of the template of {Path(key[0]).name} is missing in the other one")
        if len(numbers) != counts[key[0]]:
            raise DataError(f"{file}: {len(numbers)} entries, but {key[0]} has {counts[key[0]]} template points")
    return dict(zip(pairs, points, strict=True))


def _count(shape: PairShape) -> int:
    return 0 if shape.template is None else len(shape.template)


def _with_mirror_images(shapes: list[PairShape], roots: Sequence[Path]) -> list[PairShape]:
    """The meshes with the vertices at mirror images, by `mirror.txt` in their folder.

    The only file of a set whose folders have equally many template points counts for all of them.
    """
    files = {str(root): root / "mirror.txt" for root in roots if (root / "mirror.txt").is_file()}
    is_common = len(files) == 1 and len(set(map(_count, shapes))) == 1
    common, images = next(iter(files.values())) if is_common else None, dict[Path, Ints]()
    for i, shape in enumerate(shapes):
        path = files.get(shape.folder, common)
        if path is None or shape.template is None or shape.mirrored is not None:
            continue
        count = len(shape.template)
        if path not in images:
            images[path] = read_indices([IndexFile(path, count, "the template")])[0]
        if len(images[path]) != count:
            raise DataError(f"{path}: {len(images[path])} mirror images, but there are {count} template points")
        shapes[i] = replace(shape, mirrored=shape.template[images[path]])
    return shapes


def _read_maps(data: MeshPairs, how: dict[str, Any]) -> dict[tuple[str, str], Ints]:
    """The point-to-point maps between meshes of one part."""
    by_stem: dict[str, dict[str, list[Path]]] = {}
    beside = {Path(shape.mesh.name).parent for shape in data.train + data.test}
    for folder in dict.fromkeys(shape.folder for shape in data.train + data.test):
        places = sorted({*(Path(folder) / place for place in PLACES), *beside})
        by_stem[folder] = defaultdict(list)
        for file in (file for place in places for file in files_in(place, MAP_FORMATS, _NAMED)):
            by_stem[folder][mesh_stem(file)].append(file)
    if not any(by_stem.values()):
        return {}  # without looking at each pair: large sets have very many
    pairs_of: dict[Path, list[tuple[PairShape, PairShape]]] = defaultdict(list)
    for shapes in (data.train, data.test):
        for first, second in permutations(shapes, 2):
            names = mesh_stem(first.mesh.name), mesh_stem(second.mesh.name)
            files = [file for mark in "_-" for file in by_stem[first.folder].get(mark.join(names), ())]
            if len(files) > 1:
                raise DataError(f"{files[0]}: {files[1]} is a map of these two meshes, too. Keep one of them")
            for file in files:
                pairs_of[file].append((first, second))
    pairs = dict[Path, tuple[PairShape, PairShape]]()
    for file, fitting in pairs_of.items():
        near = [pair for pair in fitting if pair[0].folder == pair[1].folder] or fitting
        if len(near) > 1:
            meshes = " and ".join(f"({first.name}, {second.name})" for first, second in near[:2])
            raise DataError(f"{file}: the name fits the pairs {meshes}. Rename meshes, so that it fits one pair")
        pairs[file] = near[0]
    maps = read_maps([*pairs], [*pairs.values()], **how) if pairs else []
    return {(first.name, second.name): each for (first, second), each in zip(pairs.values(), maps, strict=True)}


def _pair_rule(folders: Sequence[str | os.PathLike[str]], rule: str | os.PathLike[str] | None) -> str:
    """One of RULES, or the path of a list of pairs. folders: those of the set"""
    if rule is None:
        places = [Path(folders[0], name) for name in ("pairs.txt", "test_pairs.txt")] if len(folders) == 1 else []
        return str(next((place for place in places if place.is_file()), "all"))
    if rule not in RULES and not Path(rule).is_file():
        raise DataError(f"{rule}: pairs should be one of {', '.join(RULES)}, or a file with two names in each line")
    return os.fspath(rule)


def _with_pairs(data: MeshPairs, folders: Sequence[str | os.PathLike[str]], which: str, rule: Rule) -> MeshPairs:
    is_list = which not in RULES
    parts: dict[str, list[Pair]] = {}
    for part, shapes, others in (("train", data.train, data.test), ("test", data.test, data.train)):
        pairs = _listed_pairs(shapes, others, Path(which), rule) if is_list else []
        for i, j in pairs:
            if (data.maps or data.between) and not data.has_truth(shapes[i], shapes[j]):
                raise DataError(f"{which}: there is no map from {shapes[i].name} to {shapes[j].name}")
        if not is_list or (not pairs and part == "train"):
            pairs = _pairs_by(data, shapes, "all" if is_list else which)
        if not pairs and (rule.needs_train or part == "test"):
            raise DataError(
                f"{folders[0]}: there are no pairs ({which}) of {part} meshes. This part has "
                f"{counted(len(shapes), 'mesh', 'meshes')}; train.txt and test.txt, or folders of these names, set it"
            )
        for first, second in ((shapes[i], shapes[j]) for i, j in pairs):
            if not data.between and _count(first) != _count(second):
                raise DataError(
                    f"{first.mesh.name} has {_count(first)} template points, but {second.mesh.name} has "
                    f"{_count(second)}, so they are no pair. Take pairs within folders"
                )
        parts[part] = pairs
    return replace(data, train_pairs=parts["train"], test_pairs=parts["test"])


def _pairs_by(data: MeshPairs, shapes: list[PairShape], rule: str) -> list[Pair]:
    """The pairs of meshes by one of RULES, each once, the earlier mesh first.

    If the set has maps of pairs or between classes, these are the pairs that have one, in the direction of a map.
    """
    numbers = combinations(range(len(shapes)), 2)
    pairs = (
        (i, j) for i, j in numbers if rule == "all" or (shapes[i].folder == shapes[j].folder) == (rule == "within")
    )
    if not data.maps and not data.between:
        return list(pairs)
    ways = (next((p for p in ((i, j), (j, i)) if data.has_truth(*(shapes[n] for n in p))), None) for i, j in pairs)
    return [way for way in ways if way is not None]


def _listed_pairs(shapes: Sequence[PairShape], others: Sequence[PairShape], path: Path, rule: Rule) -> list[Pair]:
    """The pairs of a list file, in its order, each once. others: the meshes of the other part, whose pairs are left out

    rule: pairs of the meshes that it leaves out are left out, too

    Raises DataError for an unknown name, and for a pair of a training and a test mesh. The message names the line.
    """
    places = {shape.name: i for i, shape in enumerate([*shapes, *others])}
    pairs, stems = [], {mesh_stem(mesh) for mesh in rule.without}
    for number, names in pair_lines(path):
        if any(_find(places, name) is None and mesh_stem(name) in stems for name in names):
            continue
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
    return list(dict.fromkeys(pairs))


def _find(places: dict[str, int], name: str) -> int | None:
    """The place of the mesh of a name, or of a name with an extension."""
    return places.get(name, places.get((Path(name).parent / mesh_stem(name)).as_posix()))
