"""The division of a set: which meshes are for training, for validation and for testing."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from diffnet.data.folders.files import (
    MESH_FOLDERS,
    PARTS,
    Part,
    counts_train,
    file_key,
    files_of_parts,
    folders_in,
    has_meshes,
    listing,
    mesh_names,
    meshes_below,
    meshes_by,
    meshes_in,
    part_of,
)
from diffnet.data.folders.sources import PART_LIST
from diffnet.data.labeled import DataError, counted
from diffnet.data.numbers import read_lines
from diffnet.geometry import FORMATS
from diffnet.geometry.errors import OptionError
from diffnet.geometry.mesh.mesh import mesh_stem

AT_RANDOM, BY_LISTS = "at random", "by the lists"  # how sources of divisions begin
FOLD = "fold {} of {}"  # how that of a fold ends

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Rule:
    """How to divide a set. Raises DataError for a fraction out of range.

    test_fraction, seed: of a random division
    group_by: a regular expression on names. Meshes of one group stay together in a random division, see `groups_of`.
    needs_train: if not, the training part may be missing, and meshes that nothing divides are for testing
    min_tests: the smallest number of test meshes that are drawn, if as many are left for training
    files: a pattern that the paths of the meshes below the folder of the set match, or None, see `meshes_by`
    fold: (i, k): the i-th of k folds, from 0, is the test part of a random division, instead of a fraction. None for no
        folds.
    without: the reasons of meshes that are left out, by their paths. The others are divided as with these.
    ignored: classes that don't count, so a part may lack them
    """

    test_fraction: float
    seed: int
    group_by: str | None
    needs_train: bool
    min_tests: int = 1
    files: str | None = None
    fold: tuple[int, int] | None = None
    without: Mapping[str, str] = field(default_factory=dict)
    ignored: Collection[str] = ()

    def __post_init__(self) -> None:
        if not 0 < self.test_fraction < 1:
            raise DataError(f"test_fraction should be between 0 and 1, got {self.test_fraction}")

    @property
    def needed(self) -> tuple[Part, ...]:
        """The parts that must have meshes."""
        return ("train", "test") if self.needs_train else ("test",)


@dataclass(frozen=True)
class Division(Generic[T]):
    """The items of each part of a set.

    source: what divides them
    left_out: what is not used, and why
    """

    parts: dict[Part, list[T]]
    source: str
    left_out: tuple[str, ...] = ()

    @property
    def every(self) -> list[T]:
        """The items of one part after the other."""
        return [item for items in self.parts.values() for item in items]

    def fields(self, items: Sequence[Any]) -> dict[str, Any]:
        """The fields that `LabeledMeshes` has, too, with other items for those of `every`."""
        ends = accumulate(map(len, self.parts.values()))
        fields: dict[str, Any] = {"source": self.source, "left_out": self.left_out}
        return fields | {
            part: items[end - len(self.parts[part]) : end] for part, end in zip(self.parts, ends, strict=True)
        }

    def of(self, make: Callable[[T], U]) -> Division[U]:
        """The division of other items, one for each."""
        return Division(
            {part: list(map(make, items)) for part, items in self.parts.items()}, self.source, self.left_out
        )

    def without(self, reasons: Mapping[str, str], path_of: Callable[[T], str] = str) -> Division[T]:
        """The division without the items of some paths. reasons: by these, for `left_out`"""
        parts = {part: [item for item in items if path_of(item) not in reasons] for part, items in self.parts.items()}
        texts = [reasons[path] for path in map(path_of, self.every) if path in reasons]
        return replace(self, parts=parts, left_out=(*self.left_out, *texts))

    def of_test(self) -> Division[T]:
        """The test part alone."""
        return Division(in_parts(("test", item) for item in self.parts["test"]), self.source, self.left_out)


def in_parts(items: Iterable[tuple[Part, T]]) -> dict[Part, list[T]]:
    """Items by their parts."""
    parts: dict[Part, list[T]] = {part: [] for part in PARTS}
    for part, item in items:
        parts[part].append(item)
    return parts


def part_folders(root: Path, has: Callable[[Path], Any] | None = None) -> dict[Path, tuple[Part, str]]:
    """The folders whose names tell a part, and what they tell.

    has: whether a folder has the meshes of a part. By default those in it count, and `train` and `test` may be empty.
    """
    has = has or _is_part
    return {folder: part for folder in folders_in(root) if (part := part_of(folder.name)) and has(folder)}


def _is_part(folder: Path) -> bool:
    return folder.name in ("train", "test") or has_meshes(folder)


def has_set(root: Path) -> bool:
    """Whether meshes are in a folder, in one of MESH_FOLDERS or in a folder whose name tells a part."""
    return any(map(has_meshes, _mesh_places(root)))


def meshes_of_set(root: Path) -> list[Path]:
    """The meshes of all parts of a set, see `has_set`."""
    return [mesh for place in _mesh_places(root) for mesh in meshes_in(place)]


def _mesh_places(root: Path) -> list[Path]:
    return [*(root / name for name in MESH_FOLDERS), *part_folders(root)]


def find_parts(root: Path, rule: Rule, meshes_of: Callable[[Path], list[Path]] | None = None) -> Division[Path]:
    """The meshes of each part: by subfolders, else by lists, else at random. Raises DataError.

    meshes_of: the meshes in a folder, which have the names of their files. By default they are those of `meshes_by`,
        with the names of `mesh_names`.
    """
    by_folder = meshes_of is None
    meshes_of = meshes_of or meshes_by(root, rule.files)
    deep = rule.files is not None or meshes_of is meshes_below or (by_folder and not has_set(root))
    places = [root] if deep else [root / name for name in MESH_FOLDERS]
    has = (lambda folder: _is_part(folder) or meshes_of(folder)) if by_folder else meshes_of if deep else None
    parts, others = _places_of_parts(root, part_folders(root, has), rule)
    if not parts:
        meshes = meshes_of(root if deep else next(filter(has_meshes, places), root))
        return divided(root, meshes, rule, mesh_names(root, meshes) if by_folder else None)
    division = in_parts((part, mesh) for folder, part in parts.items() for mesh in meshes_of(folder))
    source = f"by the folders {listing(folder.name for folder in parts)}"
    used = {mesh for meshes in division.values() for mesh in meshes}
    beside = meshes_of if deep else meshes_in
    strays = [mesh.name for place in places for mesh in beside(place) if mesh not in used]
    left_out = [f"meshes beside {source.removeprefix('by ')}: {listing(strays)}"] * bool(strays)
    left_out += [f"other folders whose names tell a part: {listing(others)}"] * bool(others)
    names = mesh_names(root, used) if by_folder else map(mesh_stem, used)
    by_name = dict(zip(used, names, strict=True))
    return _check(root, Division(division, source, tuple(left_out)), rule, by_name.__getitem__)


def divided(root: Path, meshes: Sequence[Path], rule: Rule, names: Sequence[str] | None = None) -> Division[Path]:
    """The meshes of each part, by the lists in `root`, else at random. See `find_parts`.

    names: of the meshes, which must differ; by default those of their files
    """
    names = list(map(mesh_stem, meshes)) if names is None else names
    division = divide(root, meshes, rule, names).of(meshes.__getitem__)
    return _check(root, division, rule, dict(zip(meshes, names, strict=True)).__getitem__)


def divide(
    root: Path,
    paths: Sequence[Path],
    rule: Rule,
    names: Sequence[str],
    kinds: Sequence[Any] | None = None,
) -> Division[int]:
    """The numbers of the meshes of each part, by the lists in `root`, else at random. See `find_parts`.

    names: of the meshes
    kinds: a value for each mesh, such as its class. Each kind is divided by itself.
    """
    numbers, left_out = range(len(paths)), list[str]()
    lists, others = _places_of_parts(root, lists_in(root, set(map(mesh_stem, paths))), rule)
    if lists:
        files = {file: part for file, part in lists.items() if part == "test" or counts_train(root, rule.needs_train)}
        parts = _listed(root, names, paths, files)
        source = f"{BY_LISTS} {listing(file.name for file in lists)}"
        rest = [names[i] for i in sorted({*numbers}.difference(*parts.values()))] if rule.needs_train else []
        left_out += [f"{counted(len(rest), 'mesh', 'meshes')} in no list: {listing(rest)}"] * bool(rest)
        left_out += [f"other lists: {listing(others)}"] * bool(others)
    elif rule.needs_train:
        parts, source = _drawn_parts(root, names, kinds or [0] * len(paths), rule)
    else:
        parts, source = in_parts(("test", i) for i in numbers), "by nothing, so all meshes are scored"
    division = Division(parts, source, tuple(left_out))
    if lists:
        _check(root, division.of(paths.__getitem__), rule, str)
    return division


def folder_parts(paths: Sequence[Path]) -> list[Part] | None:
    """The part of each mesh, told by a folder above it. None if no folders tell training and test meshes.

    The folders are those below the one that all meshes are in. Raises DataError if they tell the parts of some only.
    """
    common = os.path.commonpath([path.absolute() for path in paths])
    folders = [path.absolute().relative_to(common).parts[:-1] for path in paths]
    parts = [next((pair[0] for name in names if (pair := part_of(name))), None) for names in folders]
    if not {"train", "test"} <= {*parts}:
        return None
    if strays := [str(path) for path, part in zip(paths, parts, strict=True) if part is None]:
        raise DataError(
            f"folders of other meshes tell train and test, but not of {listing(strays)}; add a column split"
        )
    return [part for part in parts if part is not None]


def _places_of_parts(root: Path, told: dict[Path, tuple[Part, str]], rule: Rule) -> tuple[dict[Path, Part], list[str]]:
    """The lists or folders that divide a set, with their parts, and the names of others. Empty if none divides it.

    Names with no other word than the part come first. Raises DataError if a part is missing, except for folders with
    more words, which may hold anything.
    """
    plain = {place: pair for place, pair in told.items() if not pair[1]}
    places = plain if {*rule.needed} <= {part for part, _ in plain.values()} else told
    missing = {*rule.needed} - {part for part, _ in places.values()}
    if not missing:
        parts = {place: part for part in PARTS for place, pair in places.items() if pair[0] == part}
        return parts, [place.name for place in told if place not in parts]
    if plain or any(place.is_file() and part != "validation" for place, (part, _) in told.items()):
        place = next(iter(places))
        raise DataError(f"{root}: there is {place.name} but no {min(missing)}{place.suffix}")
    return {}, []


def lists_in(root: Path, stems: set[str]) -> dict[Path, tuple[Part, str]]:
    """The files whose names tell a part, and what they tell, also in a folder such as `splits`.

    Each line of a list is one word or the name of a mesh, so label files and notes aren't lists.

    stems: of the meshes
    """
    places = [root, *(folder for folder in folders_in(root) if re.search("split|list", folder.name, re.IGNORECASE))]
    lists = {}
    for file, told in (each for place in places for each in files_of_parts(place, (".txt", ".lst")).items()):
        of_mesh = {mesh_stem(file), mesh_stem(file).removesuffix(PART_LIST)} & stems
        lines = read_lines(file) if told[1] and not of_mesh else []
        names_meshes = all(len(line.split()) == 1 or mesh_stem(line.rpartition("/")[2]) in stems for line in lines)
        if not of_mesh and names_meshes:
            lists[file] = told
    return lists


def _listed(root: Path, names: Sequence[str], paths: Sequence[Path], files: dict[Path, Part]) -> dict[Part, list[int]]:
    """The numbers of the meshes in lists, in their order. Lists of one part may name the same.

    A line is the name or the path of a mesh, with or without its extension. Else it is the beginning of their names or
    a folder of theirs, such as the id of a patient, and names several.
    """
    whole, begin = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
    for i, (name, path) in enumerate(zip(names, paths, strict=True)):
        inside = str(path).removeprefix(f"{root}{os.sep}").replace(os.sep, "/")
        folders, _, base = inside.rpartition("/")
        stem = mesh_stem(base)
        for key in {name, inside, f"{folders}/{stem}", stem, file_key(base)}:
            whole[key].append(i)
        for key in {*folders.split("/"), *(stem[: gap.start()] for gap in re.finditer("[^A-Za-z0-9]+", stem))}:
            begin[key].append(i)

    def find(file: Path, line: str) -> list[int]:
        folders, _, base = line.replace("\\", "/").rstrip("/").rpartition("/")
        keys = (f"{folders}/{base}", f"{folders}/{mesh_stem(base)}", line, file_key(base), base)
        numbers = next((whole[key] for key in keys if key in whole), [])
        if len(numbers) > 1:
            raise DataError(f"{file}: {line!r} names several meshes: {listing(str(paths[i]) for i in numbers)}")
        return numbers or begin.get(base, [])

    parts: dict[Part, list[int]] = in_parts([])
    for file, part in files.items():
        lines = read_lines(file)
        numbers = [find(file, line) for line in lines]
        if unknown := [line for line, rows in zip(lines, numbers, strict=True) if not rows]:
            raise DataError(f"{file}: no mesh in {paths[0].parent if paths else root} for {listing(unknown)}")
        before = set(parts[part])
        parts[part] += [i for rows in numbers for i in rows if i not in before]
    return parts


def groups_of(names: Sequence[str], pattern: str | None) -> list[str | int]:
    """The group of each name: what the first group of a regular expression matches, or all of it if it has no groups.

    A name without a match is a group of its own, and so is each name without a pattern. Raises OptionError if no name
    matches, and if all are in one group.

    >>> groups_of(["p1_upper", "p1_lower", "p2_upper", "x"], "^(p[0-9]+)_")
    ['p1', 'p1', 'p2', 3]
    """
    if pattern is None:
        return list(range(len(names)))
    matches = [re.search(pattern, name) for name in names]
    if not any(matches):
        raise OptionError(f"group_by is {pattern!r}, which matches none of the names, such as {names[0]!r}")
    texts = [match and match[1 if match.re.groups else 0] for match in matches]
    groups: list[str | int] = [i if text is None else text for i, text in enumerate(texts)]
    if len(set(groups)) == 1:
        raise OptionError(f"group_by is {pattern!r}, by which all {len(names)} meshes are in one group, {groups[0]!r}")
    return groups


def drawn(groups: Sequence[Any], count: int, permutation: Callable[[int], Iterable[int]]) -> set[int]:
    """The numbers of at most `count` items, in whole groups and random order. The smallest group if none is so small.

    groups: the group of each item
    permutation: the numbers from 0 to a number, in random order
    """
    every = list(_numbers(groups).values())
    numbers: set[int] = set()
    for number in permutation(len(every)):
        if len(numbers) + len(every[number]) <= count:
            numbers.update(every[number])
    return numbers or {*min(every, key=len)}


def _drawn_parts(
    root: Path, names: Sequence[str], kinds: Sequence[Any], rule: Rule
) -> tuple[dict[Part, list[int]], str]:
    """A random share of the items of each kind for testing, in whole groups, and what divides them.

    A group may have items of several kinds. Those of a kind that came before count, too.
    """
    if len(names) < 2:
        count = counted(len(names), "mesh", "meshes")
        raise DataError(f"{root}: {count} ({', '.join(FORMATS)}, also with .gz), training and testing need at least 2")
    groups = groups_of(names, rule.group_by)
    of_kind, of_group = _numbers(kinds), _numbers(groups)
    by = "" if rule.group_by is None else f" by {len(of_group)} groups of {rule.group_by!r}"
    if rule.fold is not None:
        test, k = rule.fold
        folds = enumerate(folds_of(groups, kinds, k, rule.seed))
        parts = in_parts(("test" if fold == test else "train", i) for i, fold in folds)
        return parts, f"{AT_RANDOM}{by}, seed {rule.seed}, {FOLD.format(test + 1, k)}"
    tests: set[int] = set()
    for number, kind in enumerate(sorted(of_kind)):
        members = of_kind[kind]
        free = [i for i in members if i not in tests]
        at_least = rule.min_tests if len(members) >= 2 * rule.min_tests else 1
        wanted = min(max(round(len(members) * rule.test_fraction), at_least), len(members) - at_least)
        wanted -= len(members) - len(free)
        if wanted > 0:
            generator = np.random.default_rng(rule.seed if len(of_kind) == 1 else [rule.seed, number])
            some = drawn([groups[i] for i in free], wanted, generator.permutation)
            tests.update(i for n in some for i in of_group[groups[free[n]]])
    parts = in_parts(("test" if i in tests else "train", i) for i in range(len(names)))
    return parts, f"{AT_RANDOM}{by}, seed {rule.seed}"


def check_fold(fold: tuple[int, int] | None, source: str) -> None:
    """Raises OptionError for a fold, see `Rule`, of a set that isn't divided at random. source: what divides the set"""
    if fold is not None and FOLD.format(fold[0] + 1, fold[1]) not in source:
        raise OptionError(f"folds is {fold[1]}, but the set is divided {source or 'already'}")


def folds_of(groups: Sequence[Any], kinds: Sequence[Any], count: int, seed: int) -> list[int]:
    """The fold of each item, from 0. Groups stay together, and folds have about the same number of each kind.

    In random order, but the largest first, each group goes to the fold with the fewest items of its kind, then of all.

    Raises OptionError for fewer groups than folds.
    """
    of_group, generator = _numbers(groups), np.random.default_rng(seed)
    if len(of_group) < count:
        raise OptionError(f"folds is {count}, but there are only {counted(len(of_group), 'group', 'groups')} of meshes")
    kind_of = {group: min(kinds[i] for i in numbers) for group, numbers in of_group.items()}
    every = [list(of_group)[i] for i in generator.permutation(len(of_group))]
    fold_of, sizes = dict[Any, int](), Counter[Any]()
    for group in sorted(every, key=lambda group: (kind_of[group], -len(of_group[group]))):
        kind = kind_of[group]
        fold = min(range(count), key=lambda fold: (sizes[kind, fold], sizes[fold]))
        sizes.update({(kind, fold): len(of_group[group]), fold: len(of_group[group])})
        fold_of[group] = fold
    return [fold_of[group] for group in groups]


def _numbers(values: Sequence[Any]) -> dict[Any, list[int]]:
    """The places of each value."""
    places = defaultdict[Any, list[int]](list)
    for i, value in enumerate(values):
        places[value].append(i)
    return places


def _check(root: Path, division: Division[Path], rule: Rule, name_of: Callable[[Path], str]) -> Division[Path]:
    """The division without what is left out. Raises DataError for an empty part that is needed, and for equal names.

    Meshes of one name would share one label file, and lists may name a mesh twice.
    """
    check_fold(rule.fold, division.source)
    division = division.without(rule.without)
    seen: dict[str, str] = {}
    for part, meshes in division.parts.items():
        if not meshes and part in rule.needed:
            raise DataError(f"{root}: no meshes in {part}")
        for mesh in meshes:
            if (name := name_of(mesh)) in seen:
                places = f"{seen[name]} and as {mesh} in {part}, {division.source}"
                raise DataError(f"{root}: {mesh_stem(mesh)!r} occurs twice, {places}")
            seen[name] = f"as {mesh} in {part}"
    return division
