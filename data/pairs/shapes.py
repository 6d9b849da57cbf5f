"""A set of meshes in pairs, and the true correspondences of a pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from diffnet.data.labeled import counted
from diffnet.geometry import Mesh, MeshError
from diffnet.geometry.discretize.coincident import open_edges
from diffnet.geometry.elements.elements import face_areas
from diffnet.geometry.mesh.polygons import first_at_position

Ints: TypeAlias = NDArray[np.int64]
Pair: TypeAlias = tuple[int, int]

# A shape is partial if its boundary is longer than that of the other one by more than this part of √area. The
# circumference of a leg is about 0.4.
MAX_DIFFERENCE = 0.25


@dataclass(frozen=True)
class PairShape:
    """One mesh of a set of pairs.

    name: unique in the set
    template: the vertex of the mesh at each of the T points that all meshes of the set share, (T,), or None if it isn't
        known. Vertices are −1 for points that a partial shape lacks.
    folder: the folder of the mesh. Pairs within and across folders differ by it.
    mirrored: the vertex at the mirror image of each template point, (T,), or None if it isn't known
    whole, vertices: the shape that this one is cut from, and the numbers (V,) of its vertices there
    """

    name: str
    mesh: Mesh
    template: Ints | None = None
    folder: str = ""
    mirrored: Ints | None = None
    whole: PairShape | None = None
    vertices: Ints | None = None

    def numbers_of(self, vertices: Ints) -> Ints:
        """The numbers (N,) in this mesh of vertices of the shape that it is cut from, −1 for those that are cut off."""
        if self.whole is None or self.vertices is None:
            return vertices
        numbers = np.full(len(self.whole.mesh.verts) + 1, -1)  # the last is that of −1
        numbers[self.vertices] = np.arange(len(self.vertices))
        return numbers[vertices]

    def __repr__(self) -> str:
        points = None if self.template is None else f"{len(self.template)} points"
        return f"PairShape(name={self.name!r}, mesh={self.mesh}, template={points}, folder={self.folder!r})"


@dataclass(frozen=True)
class Truth:
    """True correspondences of a pair: N vertices of its first mesh and the N vertices of its second mesh.

    vertices: (N,) int64, vertices of the first mesh. One may occur several times.
    points: (N,) int64, vertices of the second mesh
    """

    vertices: Ints
    points: Ints


@dataclass(frozen=True)
class MeshPairs:
    """A data set of pairs: meshes for training and for testing, and the pairs of each part.

    train, test: the meshes
    train_pairs, test_pairs: positions (first, second) in `train` or `test`
    maps: point-to-point maps by the names of the two meshes: for each vertex of the first, a vertex of the second
    between: by two folders with template points of their own: for each point of the first, one of the second, from 0.
        If there are any, no other folders share their points.
    source, left_out: see `LabeledMeshes`
    """

    train: list[PairShape]
    test: list[PairShape]
    train_pairs: list[Pair]
    test_pairs: list[Pair]
    maps: Mapping[tuple[str, str], Ints] = field(default_factory=dict)
    between: Mapping[tuple[str, str], Ints] = field(default_factory=dict)
    source: str = ""
    left_out: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return (
            f"MeshPairs(train={counted(len(self.train), 'mesh', 'meshes')}, "
            f"test={counted(len(self.test), 'mesh', 'meshes')}, "
            f"train_pairs={len(self.train_pairs)}, test_pairs={len(self.test_pairs)}, "
            f"is_supervised={self.is_supervised})"
        )

    @property
    def is_supervised(self) -> bool:
        """Whether the true correspondences are known."""
        return bool(self.maps) or any(shape.template is not None for shape in self.train + self.test)

    @property
    def test_shapes(self) -> list[tuple[PairShape, PairShape]]:
        """The meshes of each test pair."""
        return [(self.test[i], self.test[j]) for i, j in self.test_pairs]

    def share_template(self, first: PairShape, second: PairShape) -> bool:
        """Whether both meshes have their places of the same template points."""
        is_known = first.template is not None and second.template is not None
        return is_known and (not self.between or first.folder == second.folder)

    def _template_points(self, first: PairShape, second: PairShape) -> tuple[Ints | slice, Ints | slice] | None:
        """The template points of each mesh that correspond. None if they aren't known."""
        every = slice(None)
        if self.share_template(first, second):
            return every, every
        there, back = (self.between.get(key) for key in ((first.folder, second.folder), (second.folder, first.folder)))
        if there is not None:
            return every, there
        return None if back is None else (back, every)

    def has_truth(self, first: PairShape, second: PairShape) -> bool:
        """Whether the true correspondences from the first mesh to the second are known."""
        return (first.name, second.name) in self.maps or self._template_points(first, second) is not None

    def truth(self, first: PairShape, second: PairShape) -> Truth | None:
        """The true correspondences from the first mesh to the second, or None if they aren't known.

        Maps give them for all vertices of the first mesh, and template points for these. Those of partial shapes are in
        the overlap.
        """
        places = self._places(first, second)
        if places is None:
            return None
        both = (places[0] >= 0) & (places[1] >= 0)
        return Truth(places[0][both], places[1][both])

    def is_partial(self, first: PairShape, second: PairShape) -> bool:
        """Whether one of two shapes is cut from another one, or has points without a partner."""
        places = self._places(first, second)
        if places is None or first.whole is not None or second.whole is not None:
            return places is not None
        return any(bool((vertices < 0).any()) for vertices in places)

    def overlap(self, first: PairShape, second: PairShape) -> tuple[Ints, Ints]:
        """Which vertices of each mesh are on the other one, too: (V_first,) and (V_second,) int64.

        1 for a vertex in the overlap, 0 for one outside, −1 where it isn't known, as at vertices without a template
        point. By a map from the first mesh, vertices of the second one are outside if they are no image and not beside
        any.
        """
        sides = np.full(len(first.mesh.verts), -1), np.full(len(second.mesh.verts), -1)
        places = self._places(first, second)
        if places is None:
            return sides
        both = (places[0] >= 0) & (places[1] >= 0)
        for labels, vertices in zip(sides, places, strict=True):
            labels[vertices[vertices >= 0]] = 0
            labels[vertices[both]] = 1
        if (first.name, second.name) in self.maps:
            faces = second.mesh.faces
            beside = np.unique(faces[(sides[1][faces] == 1).any(1)])
            sides[1][np.setdiff1d(np.arange(len(sides[1])), beside)] = 0
        return sides

    def _places(self, first: PairShape, second: PairShape) -> tuple[Ints, Ints] | None:
        """Vertices of the first mesh and of the second that correspond, (N,) each; −1 for one that is missing.

        Those of the shapes that they are cut from decide. None if these aren't known. All vertices of parts of one
        shape correspond.
        """
        one, other = first.whole or first, second.whole or second
        if one.name == other.name and (first.whole or second.whole) is not None:
            every = np.arange(len(one.mesh.verts))
            return first.numbers_of(every), second.numbers_of(every)
        points, vertices = self._template_points(one, other), self.maps.get((one.name, other.name))
        if vertices is not None:
            pair = np.arange(len(vertices)), vertices
        elif points is None or one.template is None or other.template is None:
            return None
        else:
            pair = one.template[points[0]], other.template[points[1]]
        return first.numbers_of(pair[0]), second.numbers_of(pair[1])

    def mirrored_truth(self, first: PairShape, second: PairShape) -> Truth | None:
        """The correspondences with left and right exchanged. None without a symmetry, and for partial shapes."""
        points = self._template_points(first, second)
        if points is None or first.template is None or second.template is None or self.is_partial(first, second):
            return None
        mirrored = None if second.mirrored is None else second.mirrored[points[1]]
        return None if mirrored is None or (mirrored < 0).any() else Truth(first.template[points[0]], mirrored)


def check_whole(pairs: Sequence[tuple[Mesh, Mesh]]) -> None:
    """Raises MeshError if one of the two meshes of a pair is a part of a shape and the other one a whole.

    Both may have a boundary, as scans of faces have. A shape counts as partial if its boundary is longer than that of
    the other one by more than MAX_DIFFERENCE √area. Point clouds have no boundary.
    """
    meshes = {id(mesh): mesh for pair in pairs for mesh in pair}
    lengths = {key: boundary_length(mesh) for key, mesh in meshes.items()}
    for pair in pairs:
        whole, part = sorted(pair, key=lambda mesh: lengths[id(mesh)])
        shorter, longer = lengths[id(whole)], lengths[id(part)]
        if longer - shorter > MAX_DIFFERENCE:
            raise MeshError(
                f"{part.name}: partial shapes are not supported; its boundary is {longer:.2f} √area long, that of "
                f"{whole.name} {shorter:.2f} √area. A network of --partial matches them"
            )


def boundary_length(mesh: Mesh) -> float:
    """The length of all edges that belong to one face only, divided by √area. Vertices at one position are joined."""
    faces = first_at_position(mesh.verts)[mesh.faces]
    start, end = mesh.verts[open_edges(faces, len(mesh.verts))].transpose(1, 0, 2)
    length, area = float(np.linalg.norm(end - start, axis=1).sum()), float(face_areas(mesh).sum())
    return length / np.sqrt(area) if area > 0 else 0.0
