"""The division of a set: which meshes are for training, for validation and for testing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import numpy as np

from diffnet.data.counts import counted
from diffnet.data.folders.files import (
    MESH_FOLDERS,
    counts_train,
    file_key,
    folders_in,
    has_meshes,
    listing,
    meshes_below,
    meshes_in,
    named_files,
)
from diffnet.data.folders.numbers import read_lines, text_of
from diffnet.data.folders.sources import PART_LIST
from diffnet.data.labeled import DataError
from diffnet.geometry import FORMATS
from diffnet.geometry.errors import OptionError
from diffnet.geometry.mesh.mesh import mesh_stem, mesh_suffix

Part: TypeAlias = Literal["train", "validation", "test"]
PARTS: tuple[Part, ...] = get_args(Part)
AT_RANDOM, BY_LISTS, BY_FOLDERS = "at random", "by the lists", "by the folders"  # how sources of divisions begin

_TOLD: dict[Part, str] = {
    "train": "train training trainset",
    "validation": "val valid validation valset dev",
    "test": "test testing testset",
}
_PART_OF: dict[str, Part] = {word: part for part, words in _TOLD.items() for word in words.split()}
_WORD = re.compile("(?<![0-9])(?:[A-Z]?[a-z]+|[A-Z]+(?![a-z]))|[0-9]+")
_LISTS = (".txt", ".lst", ".json")
_FOLDERS_OF_LISTS = {"split", "splits", "list", "lists"}

T = TypeVar("T")
U = TypeVar("U")


class Rule(NamedTuple):
    """How to divide a set.

    test_fraction, seed: of a random division
    group_by: a regular expression on names. Meshes of one group stay together in a random division, see `groups_of`.
    split: words, joined by +, that tell which lists or folders to take
    needs_train: if not, the training part may be missing, and meshes that nothing divides are for testing
    min_tests: the smallest number of test meshes that are drawn, if as many are left for training
    """

    test_fraction: float = 0.2
    seed: int = 0
    group_by: str | None = None
    split: str | None = None
    needs_train: bool = True
    min_tests: int = 1

    def check(self) -> None:
        """Raises DataError for a fraction out of range."""
        if not 0 < self.test_fraction < 1:
            raise DataError(f"test_fraction should be between 0 and 1, got {self.test_fraction}")


@dataclass(frozen=True)
class Division(Generic[T]):
    """The items of each part of a set.

    source: what divides them
    left_out: what is not used, and why
    lists: the files that name the items
    """

    train: list[T]
    validation: list[T]
    test: list[T]
    source: str = ""
    left_out: tuple[str, ...] = ()
    lists: tuple[Path, ...] = ()

    @property
    def parts(self) -> list[list[T]]:
        return [self.train, self.validation, self.test]

    @property
    def every(self) -> list[T]:
        """The items of one part after the other."""
        return [item for part in self.parts for item in part]

    def fields(self, items: Sequence[Any]) -> dict[str, Any]:
        """The fields that `LabeledMeshes` has, too, with other items for those of `every`."""
        ends = accumulate(map(len, self.parts))
        parts = {name: items[end - len(own) : end] for name, own, end in zip(PARTS, self.parts, ends, strict=True)}
        return {**parts, "source": self.source, "left_out": self.left_out}

    def of(self, make: Callable[[T], U]) -> Division[U]:
        """The division of other items, one for each."""
        train, validation, test = ([make(item) for item in part] for part in self.parts)
        return Division(train, validation, test, self.source, self.left_out, self.lists)

    def of_test(self) -> Division[T]:
        """The test part alone."""
        return Division([], [], self.test, self.source, self.left_out, self.lists)


def part_of(name: str) -> tuple[Part, str] | None:
    """The part that a word in the name of a list or folder tells, and the other words. None if it tells not one part.

    >>> part_of("training_upper"), part_of("SMALTest"), part_of("latest"), part_of("train_test_split")
    (('train', 'upper'), ('test', 'smal'), None, None)
    """
    words = _words(name)
    told = [_PART_OF[word] for word in words if word in _PART_OF]
    return (told[0], "_".join(word for word in words if word not in _PART_OF)) if len(told) == 1 else None


def _words(name: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(name)]


def part_named(word: str) -> Part | None:
    """The part that a word names, such as a cell of the column split of a table."""
    return _PART_OF.get(word.strip().lower())


def part_folders(root: Path, has: Callable[[Path], Any] | None = None) -> dict[Path, tuple[Part, str]]:
    """The folders whose names tell a part, and what they tell.

    has: whether a folder has the meshes of a part. By default those in it count, and `train` and `test` may be empty.
    """
    has = has or (lambda folder: folder.name in ("train", "test") or has_meshes(folder))
    told = {folder: part_of(folder.name) for folder in folders_in(root)}
    return {folder: own for folder, own in told.items() if own and has(folder)}


def has_set(root: Path) -> bool:
    """Whether meshes are in a folder, in one of MESH_FOLDERS or in a folder whose name tells a part."""
    return any(has_meshes(folder) for folder in (*(root / name for name in MESH_FOLDERS), *part_folders(root)))


def find_parts(root: Path, rule: Rule, meshes_of: Callable[[Path], list[Path]] = meshes_in) -> Division[Path]:
    """The meshes of each part: by subfolders, else by lists, else at random. Raises DataError.

    meshes_of: the meshes in a folder
    """
    deep = meshes_of is meshes_below
    chosen = _chosen(root, part_folders(root, meshes_below if deep else None), rule)
    if not chosen:
        folder = root if deep else next((root / name for name in MESH_FOLDERS if has_meshes(root / name)), root)
        return divided(root, meshes_of(folder), folder, rule)
    parts = {part: [mesh for folder in chosen.get(part, ()) for mesh in meshes_of(folder)] for part in PARTS}
    names = listing(folder.name for own in chosen.values() for folder in own)
    every = meshes_of(root) if deep else [mesh for name in MESH_FOLDERS for mesh in meshes_in(root / name)]
    used = {mesh for part in parts.values() for mesh in part}
    strays = [mesh.name for mesh in every if mesh not in used]
    left_out = (f"meshes beside the folders {names}: {listing(strays)}",) if strays else ()
    return _checked(root, Division(**parts, source=f"{BY_FOLDERS} {names}", left_out=left_out), rule)


def divided(root: Path, meshes: list[Path], folder: Path, rule: Rule) -> Division[Path]:
    """The meshes of each part, by the lists in `root`, else at random. See `find_parts`."""
    found = divide(root, list(map(mesh_stem, meshes)), meshes, rule, folder=folder)
    return _checked(root, found.of(meshes.__getitem__), rule)


def divide(
    root: Path,
    names: Sequence[str],
    paths: Sequence[Path],
    rule: Rule,
    *,
    folder: Path | None = None,
    kinds: Sequence[Any] | None = None,
) -> Division[int]:
    """The numbers of the meshes of each part, by the lists in `root`, else at random. See `find_parts`.

    names, paths: of the meshes
    folder: that has the meshes, for messages
    kinds: a value for each mesh, such as its class. Each kind is divided by itself.
    """
    told = _lists(root, set(map(mesh_stem, paths)))
    chosen = _chosen(root, told, rule)
    if chosen:
        if not counts_train(root, rule.needs_train):
            chosen = {"test": chosen["test"]}
        return _by_lists(root, names, paths, folder or root, {p: {f: told[f][1] for f in chosen[p]} for p in chosen})
    if rule.split is not None:
        others = listing(place.name for place in (*told, *part_folders(root)))
        raise OptionError(
            f"split is {rule.split!r}, but no lists or folders in {root} have this word beside train and test in "
            f"their names{f'; there are {others}' if others else ''}"
        )
    if not rule.needs_train:
        return Division([], [], list(range(len(names))), "by nothing, so all meshes are scored")
    if len(names) < 2:
        found = counted(len(names), "mesh", "meshes")
        raise DataError(f"{root}: {found} ({', '.join(FORMATS)}, also with .gz), training and testing need at least 2")
    groups = groups_of(names, rule.group_by)
    tests = _drawn_tests(groups, kinds or [0] * len(names), rule)
    train = [i for i in range(len(names)) if i not in tests]
    by = "" if rule.group_by is None else f" by {counted(len(set(groups)), 'group', 'groups')} of {rule.group_by!r}"
    return Division(train, [], sorted(tests), f"{AT_RANDOM}{by}, seed {rule.seed}")


def _chosen(root: Path, told: dict[Path, tuple[Part, str]], rule: Rule) -> dict[Part, list[Path]]:
    """Of lists or folders, those that divide a set, by their parts. Empty if none do.

    Names with no other word than the part come first. Raises DataError if a part is missing.
    """
    needed: set[Part] = {"train", "test"} if rule.needs_train else {"test"}
    if rule.split is not None:
        wanted = [["_".join(_words(own)) for own in rule.split.split("+")]]
    else:
        wanted = [[""], [rest for _, rest in told.values()]]
    for rests in wanted:
        chosen: dict[Part, list[Path]] = {}
        for place, (part, rest) in told.items():
            if rest in rests:
                chosen.setdefault(part, []).append(place)
        if chosen and needed <= chosen.keys():
            return {part: chosen[part] for part in PARTS if part in chosen}
    if chosen and (len(chosen) > 1 or "validation" not in chosen or "" in wanted[-1]):
        missing = min(needed - chosen.keys())
        place = next(iter(chosen.values()))[0]
        raise DataError(f"{root}: there is {place.name} but no {missing}{place.suffix}")
    return {}


def _lists(root: Path, stems: set[str]) -> dict[Path, tuple[Part, str]]:
    """The files whose names tell a part, and what they tell, also in folders such as `splits`.

    Files of labels, and notes, are not among them: a list has one word in each line.

    stems: of the meshes, which may have label files in the same folder
    """
    places = [root, *(folder for folder in folders_in(root) if _FOLDERS_OF_LISTS & set(_words(folder.name)))]
    found = {}
    for file in (file for place in places for file in named_files(place, _LISTS)):
        stem = mesh_stem(file)
        told = None if stem in stems or stem.removesuffix(PART_LIST) in stems else part_of(stem)
        if told and (not told[1] or all(len(line.split()) == 1 for line in _lines(file))):
            found[file] = told
    return found


def _lines(file: Path) -> list[str]:
    """The names in a list. Raises DataError for an empty file, and for JSON that is no list of text."""
    if mesh_suffix(file) != ".json":
        return read_lines(file)
    try:
        content = json.loads(text_of(file))
    except (ValueError, RecursionError) as e:
        raise DataError(f"{file}: the file is not JSON ({e})") from e
    if not isinstance(content, list) or not all(isinstance(name, str) for name in content):
        raise DataError(f"{file}: the name tells a list of meshes, so it should hold a list of their names")
    return content


def _by_lists(
    root: Path, names: Sequence[str], paths: Sequence[Path], folder: Path, lists: dict[Part, dict[Path, str]]
) -> Division[int]:
    """The numbers of the meshes in lists, in their order.

    lists: the files of each part, with the other words in their names
    """
    find = _finder(root, names, paths)
    parts: dict[Part, list[int]] = {part: [] for part in PARTS}
    seen: dict[int, tuple[Part, Path]] = {}
    for part, files in lists.items():
        for file in files:
            lines = _lines(file)
            found = list(map(find, lines))
            if unknown := [line for line, own in zip(lines, found, strict=True) if not own]:
                raise DataError(f"{file}: no mesh in {folder} for {listing(unknown)}")
            for i in (i for own in found for i in own):
                other, before = seen.setdefault(i, (part, Path()))
                if other != part or before == file:
                    raise DataError(_twice(root, paths[i], other, part, lists))
                if seen[i] == (part, Path()):
                    parts[part].append(i)
                seen[i] = part, file
    every = tuple(file for files in lists.values() for file in files)
    rest = [names[i] for i in range(len(names)) if i not in seen]
    left_out = (
        (f"{counted(len(rest), 'mesh', 'meshes')} in none of the lists: {listing(rest)}",)
        if rest and parts["train"]
        else ()
    )
    source = f"{BY_LISTS} {listing(file.name for file in every)}"
    return Division(**parts, source=source, left_out=left_out, lists=every)


def _twice(root: Path, mesh: Path, first: Part, second: Part, lists: dict[Part, dict[Path, str]]) -> str:
    """The message for a mesh in two parts, or twice in a list. It says how to take some of several kinds of lists."""
    message = f"{root}: {mesh_stem(mesh)!r} occurs twice, as {mesh} in {first} and as {mesh} in {second}"
    kinds = {rest: file.name for files in lists.values() for file, rest in files.items()}
    if len(kinds) < 2:
        return message
    words = listing(f"--split {rest} for {name}" for rest, name in kinds.items())
    return f"{message}. These lists contradict each other; choose some: {words}"


def _finder(root: Path, names: Sequence[str], paths: Sequence[Path]) -> Callable[[str], list[int]]:
    """A function from a line of a list to the numbers of the meshes that it names.

    A line is the name or the path of a mesh, with or without its extension. Else it is the beginning of their names or
    a folder of theirs, such as the id of a patient, and names several.
    """
    whole: dict[str, list[int]] = {}
    last: dict[str, list[int]] = {}
    ids: dict[str, list[int]] = {}
    for i, (name, path) in enumerate(zip(names, paths, strict=True)):
        inside = path.relative_to(root) if path.is_relative_to(root) else Path(path.name)
        stem = mesh_stem(path)
        for table, keys in (
            (whole, (name, inside.as_posix(), (inside.parent / stem).as_posix())),
            (last, (stem, file_key(path))),
            (ids, (*inside.parts[:-1], *(stem[: gap.start()] for gap in re.finditer(r"[^A-Za-z0-9]+", stem)))),
        ):
            for key in dict.fromkeys(keys):
                table.setdefault(key, []).append(i)

    def find(line: str) -> list[int]:
        line = line.replace("\\", "/").rstrip("/")
        base = line.rsplit("/", 1)[-1]
        for key in (line, (Path(line).parent / mesh_stem(line)).as_posix()):
            if key in whole:
                return whole[key]
        found = last.get(file_key(base)) or last.get(base) or []
        if len(found) > 1:
            raise DataError(f"{root}: {line!r} in a list names several meshes: {listing(names[i] for i in found)}")
        return found or ids.get(base, [])

    return find


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
    found = [match and (match.group(1) if match.re.groups else match.group()) for match in matches]
    groups: list[str | int] = [i if group is None else group for i, group in enumerate(found)]
    if len(set(groups)) == 1:
        raise OptionError(f"group_by is {pattern!r}, by which all {len(names)} meshes are in one group, {groups[0]!r}")
    return groups


def drawn(groups: Sequence[Any], count: int, permutation: Callable[[int], Iterable[int]]) -> set[int]:
    """The numbers of about `count` items in random order, in whole groups: no more, unless the first groups are larger.

    groups: the group of each item
    permutation: the numbers from 0 to a number, in random order
    """
    every = list(_numbers(groups).values())
    found: set[int] = set()
    for number in permutation(len(every)):
        if len(found) + len(every[number]) <= count:
            found.update(every[number])
    return found or set(min(every, key=len))


def _drawn_tests(groups: Sequence[Any], kinds: Sequence[Any], rule: Rule) -> set[int]:
    """The numbers of a random share of the items of each kind. A group that was drawn for a kind before stays so."""
    of_kind, of_group = _numbers(kinds), _numbers(groups)
    tests: set[int] = set()
    decided: set[Any] = set()
    for number, kind in enumerate(sorted(of_kind)):
        members = of_kind[kind]
        free = [i for i in members if groups[i] not in decided]
        at_least = rule.min_tests if len(members) >= 2 * rule.min_tests else 1
        wanted = min(max(round(len(members) * rule.test_fraction), at_least), len(members) - at_least)
        wanted -= sum(i in tests for i in members)
        if wanted > 0 and free:
            generator = np.random.default_rng(rule.seed if len(of_kind) == 1 else [rule.seed, number])
            own = drawn([groups[i] for i in free], wanted, generator.permutation)
            tests.update(i for n in own for i in of_group[groups[free[n]]])
        decided.update(groups[i] for i in members)
    return tests


def _numbers(values: Sequence[Any]) -> dict[Any, list[int]]:
    """The places of each value."""
    found: dict[Any, list[int]] = {}
    for i, value in enumerate(values):
        found.setdefault(value, []).append(i)
    return found


def _checked(root: Path, found: Division[Path], rule: Rule) -> Division[Path]:
    """Raises DataError for an empty part that is needed, and for a mesh name that occurs twice.

    Meshes of one name would share one label file.
    """
    seen: dict[str, tuple[Path, str]] = {}
    for name, meshes in zip(PARTS, found.parts, strict=True):
        if not meshes and (name == "test" or (name == "train" and rule.needs_train)):
            raise DataError(f"{root}: no meshes in {name}")
        for mesh in meshes:
            stem = mesh_stem(mesh)
            if stem in seen:
                other, part = seen[stem]
                raise DataError(f"{root}: {stem!r} occurs twice, as {other} in {part} and as {mesh} in {name}")
            seen[stem] = mesh, name
    return found


def by_column(cells: Iterable[Part], source: str) -> Division[int]:
    """The numbers of the lines of a table, by a column that names their parts."""
    parts: dict[Part, list[int]] = {part: [] for part in PARTS}
    for i, part in enumerate(cells):
        parts[part].append(i)
    return Division(**parts, source=source)
