"""A set of meshes in pairs, and the true correspondences of a pair."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from diffnet.data.labeled import counted
from diffnet.geometry import Mesh, MeshError, SurfacePoints, closest_points, make_mesh
from diffnet.geometry.discretize.coincident import first_at_position, open_edges
from diffnet.geometry.elements.elements import face_areas

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Pair: TypeAlias = tuple[int, int]

MAX_KEPT = 512  # truths of a set, each of 200 KB for 5,000 vertices
# A shape is partial if its boundary is longer than that of the other one by more than this part of √area. The
# circumference of a leg is about 0.4.
MAX_DIFFERENCE = 0.25


@dataclass(frozen=True)
class PairShape:
    """One mesh of a set of pairs.

    name: unique in the set
    template: the place on the mesh of each of the T points that all meshes of the set share: (T,) vertices, or
        `SurfacePoints` (T). None if it isn't known.
    folder: the folder of the mesh. Pairs within and across folders differ by it.
    mirrored: the vertex at the mirror image of each template point, (T,), or None if it isn't known
    """

    name: str
    mesh: Mesh
    template: Ints | SurfacePoints | None = None
    folder: str = ""
    mirrored: Ints | None = None

    def __repr__(self) -> str:
        points = None if self.template is None else f"{len(self.template)} points"
        return f"PairShape(name={self.name!r}, mesh={self.mesh}, template={points}, folder={self.folder!r})"


@dataclass(frozen=True)
class Truth:
    """True correspondences of a pair: N vertices of its first mesh and their places on its second mesh.

    vertices: (N,) int64, vertices of the first mesh. One may occur several times.
    points: (N,) int64, vertices of the second mesh, or `SurfacePoints` (N) of it
    """

    vertices: Ints
    points: Ints | SurfacePoints

    def nearest_vertices(self, target: Mesh) -> Ints:
        """The vertices (N,) of the second mesh that are nearest to the points: the best prediction by vertices."""
        return self.points.nearest_corners(target) if isinstance(self.points, SurfacePoints) else self.points


@dataclass(frozen=True)
class MeshPairs:
    """A data set of pairs: meshes for training and for testing, and the pairs of each part.

    train, test: the meshes
    train_pairs, test_pairs: positions (first, second) in `train` or `test`
    template_faces: (F, 3) triangles between the template points, or None if these are vertices of the meshes
    mirror: the template point on the other side of the body, for each of the T template points: (T,) template points,
        or `SurfacePoints` of the template. None for sets without symmetry, and for those whose meshes have `mirrored`.
    maps: point-to-point maps by the names of the two meshes: for each vertex of the first, a vertex of the second
    between: by two folders with template points of their own: for each point of the first, one of the second. If there
        are any, no other folders share their points.
    source, left_out: see `LabeledMeshes`
    """

    train: list[PairShape]
    test: list[PairShape]
    train_pairs: list[Pair]
    test_pairs: list[Pair]
    template_faces: Ints | None = None
    mirror: Ints | SurfacePoints | None = None
    maps: Mapping[tuple[str, str], Ints] = field(default_factory=dict)
    between: Mapping[tuple[str, str], Ints] = field(default_factory=dict)
    source: str = ""
    left_out: tuple[str, ...] = ()
    _memo: dict[tuple[str, ...], Any] = field(default_factory=dict, init=False, repr=False, compare=False)

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

        Maps and points in faces give them for all vertices of the first mesh, and template vertices for these.
        """
        vertices = self.maps.get((first.name, second.name))
        if vertices is not None:
            return Truth(np.arange(len(vertices)), vertices)
        points = self._template_points(first, second)
        if points is None or first.template is None or second.template is None:
            return None
        if isinstance(first.template, SurfacePoints) or isinstance(second.template, SurfacePoints):
            return self._truth_at(first, second, "truth", lambda: self._template_positions(second))
        return Truth(first.template[points[0]], second.template[points[1]])

    def mirrored_truth(self, first: PairShape, second: PairShape) -> Truth | None:
        """The correspondences with left and right exchanged, or None if the set has no symmetry."""
        points = self._template_points(first, second)
        if points is not None and second.mirrored is not None and isinstance(first.template, np.ndarray):
            return Truth(first.template[points[0]], second.mirrored[points[1]])
        if points is None or self.mirror is None or first.template is None or second.template is None:
            return None
        if isinstance(self.mirror, SurfacePoints):
            mirror, faces = self.mirror, self._faces()
            return self._truth_at(
                first, second, "mirror", lambda: mirror.interpolate(faces, self._template_positions(second))
            )
        assert not isinstance(first.template, SurfacePoints)
        assert not isinstance(second.template, SurfacePoints)
        return Truth(first.template[points[0]], second.template[self.mirror][points[1]])

    def _faces(self) -> Ints:
        assert self.template_faces is not None, "points in faces need the triangles of the template"
        return self.template_faces

    def _template_positions(self, shape: PairShape) -> NDArray[np.float64]:
        """The positions of the template points, (T, 3)."""
        if isinstance(shape.template, SurfacePoints):
            return shape.template.interpolate(shape.mesh.faces, shape.mesh.verts)
        return shape.mesh.verts[shape.template]

    def _truth_at(self, first: PairShape, second: PairShape, kind: str, places: Callable[[], Floats]) -> Truth:
        """The vertices of the first mesh at the places (T, 3) of the template points, kept in memory."""
        key = (first.name, second.name, kind)
        if key not in self._memo:
            if len(self._memo) >= MAX_KEPT:
                self._memo.clear()
            points = self._on_template(first).interpolate(self._faces(), places())
            self._memo[key] = Truth(np.arange(len(first.mesh.verts)), closest_points(second.mesh, points))
        return self._memo[key]

    def _on_template(self, shape: PairShape) -> SurfacePoints:
        """The vertices of a mesh as points of the template, which lies almost on the mesh."""
        key = (shape.name,)
        if key not in self._memo:
            template = make_mesh(self._template_positions(shape), self._faces())
            self._memo[key] = closest_points(template, shape.mesh.verts)
        return self._memo[key]


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
                f"{whole.name} {shorter:.2f} √area"
            )


def boundary_length(mesh: Mesh) -> float:
    """The length of all edges that belong to one face only, divided by √area. Vertices at one position are joined."""
    faces = first_at_position(mesh.verts)[mesh.faces]
    start, end = mesh.verts[open_edges(faces, len(mesh.verts))].transpose(1, 0, 2)
    length, area = float(np.linalg.norm(end - start, axis=1).sum()), float(face_areas(mesh).sum())
    return length / np.sqrt(area) if area > 0 else 0.0
