"""The choice of pairs from the meshes of a set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path

from diffnet.data.labeled import DataError
from diffnet.data.numbers import read_lines
from diffnet.data.pairs.shapes import Pair, PairShape
from diffnet.geometry.mesh.mesh import mesh_stem

RULES = ("all", "within", "across")


def choose_pairs(shapes: Sequence[PairShape], rule: str) -> list[Pair]:
    """The pairs of meshes, each once, the earlier mesh first.

    rule: "all" pairs; those of meshes "within" one folder; or those "across" folders
    """
    pairs = list(combinations(range(len(shapes)), 2))
    if rule == "all":
        return pairs
    same = rule == "within"
    return [(i, j) for i, j in pairs if (shapes[i].folder == shapes[j].folder) == same]


def listed_pairs(shapes: Sequence[PairShape], others: Sequence[PairShape], path: Path) -> list[Pair]:
    """The pairs of a list file, in its order: the names of two meshes in each line, separated by blanks or a comma.

    shapes: the meshes of this part of the set
    others: those of the other part. Pairs of these are left out.

    Names may have the extensions of mesh files. Raises DataError for a line of another form, for an unknown name, and
    for a pair of a training and a test mesh. The message names the line.
    """
    place = _places(shapes)
    elsewhere = _places(others)
    pairs = []
    for number, names in _lines(path):
        found, away = ([_find(known, name) for name in names] for known in (place, elsewhere))
        for name, here, there in zip(names, found, away, strict=True):
            if here is None and there is None:
                raise DataError(f"{path}, line {number}: there is no mesh {name[:60]!r}")
        first, second = found
        if first is not None and second is not None:
            pairs.append((first, second))
        elif any(here is not None for here in found):
            raise DataError(f"{path}, line {number}: one of {names[0]} and {names[1]} is for training, one for testing")
    return pairs


def named_in_pairs(shapes: Sequence[PairShape], path: Path) -> set[str]:
    """The names of the meshes in a list file, see `listed_pairs`."""
    place = _places(shapes)
    found = [_find(place, name) for _, names in _lines(path) for name in names]
    return {shapes[i].name for i in found if i is not None}


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The lines of a list file with their numbers from 1."""
    for number, line in enumerate(read_lines(path), 1):
        names = line.replace(",", " ").split()
        if len(names) != 2:
            raise DataError(f"{path}, line {number}: expected the names of two meshes, got {line[:60]!r}")
        yield number, names


def _find(known: dict[str, int], name: str) -> int | None:
    """The mesh of a name, or of a name with an extension."""
    return known.get(name, known.get((Path(name).parent / mesh_stem(name)).as_posix()))


def _places(shapes: Sequence[PairShape]) -> dict[str, int]:
    return {shape.name: i for i, shape in enumerate(shapes)}
