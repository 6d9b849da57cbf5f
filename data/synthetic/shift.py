"""Figures and bodies of another source than the training meshes: other builds, meshers, annotators, and lost parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from scipy.sparse.csgraph import connected_components, dijkstra

from diffnet.data.synthetic.shape import PARTS, Floats, Shape, bone_distances
from diffnet.data.synthetic.surface import Ints, Surface, edge_graph, skin_normals, triangulate, with_faces
from diffnet.geometry import decimate, make_mesh
from diffnet.geometry.errors import OptionError

SHIFTS = ("builds", "mesher", "boundaries", "missing")
Shift: TypeAlias = "frozenset[str]"

# Factors of the mean sizes, which are far outside the training range. "radii" are those of all limbs and of the trunk.
BUILDS: dict[str, dict[str, float]] = {
    "child": {"head": 1.2, "neck": 0.7, "legs": 0.66, "arms": 0.7, "trunk": 0.82, "hand": 0.75, "foot": 0.75},
    "heavy": {"radii": 1.3, "waist radius": 1.35, "hip radius": 1.12, "hip": 1.2, "neck": 0.7, "chest width": 1.15},
    "thin": {"radii": 0.72, "legs": 1.15, "arms": 1.15, "head": 0.85, "neck": 1.3},
    "ape": {"arms": 1.4, "legs": 0.62, "shoulder": 1.25, "chest width": 1.25, "hand": 1.3, "arm radius": 1.4},
    "giant hands": {"hand": 1.5, "foot": 1.7, "head": 0.75, "wrist radius": 1.3, "ankle radius": 1.4, "trunk": 1.1},
}
SIZE_GROUPS = {
    "legs": ("thigh", "shin"),
    "arms": ("upper arm", "forearm"),
    "trunk": ("chest height", "chest width", "shoulder", "hip"),
    "radii": ("waist radius", "hip radius", "chest radius", "arm radius", "wrist radius", "thigh radius",
              "knee radius", "ankle radius", "shoulder radius"),
}  # fmt: skip

MESHERS = ("adaptive", "decimated", "subdivided", "scan")
_DECIMATED = 750  # vertices
_BEFORE_SUBDIVISION = 300
_SCAN = (1500, 3000)
_SCAN_NOISE = (0.003, 0.006)  # standard deviation along the normals, in meters
_SCAN_HOLES = (8, 16)
_SCAN_RADII = (0.03, 0.09)

# The other annotators: added to the distance of each part's bones, in meters. The nearest bone decides the label, so a
# part with a negative number reaches farther into its neighbors.
_BOUNDARIES = {"head": -0.04, "torso": 0.0, "upper arm": 0.025, "forearm": 0.0, "hand": -0.03, "thigh": -0.03,
               "shin": 0.015, "foot": -0.03}  # fmt: skip
BOUNDARY_OFFSETS = np.array([_BOUNDARIES[part] for part in PARTS])

# What a figure may lack: parts of one limb, or the head.
_LOSSES = ((("head",), (0,)), (("hand",), (-1, 1)), (("forearm", "hand"), (-1, 1)), (("foot",), (-1, 1)),
           (("shin", "foot"), (-1, 1)))  # fmt: skip


def shift_of(text: str, known: Sequence[str] = SHIFTS) -> Shift:
    """The kinds of a shift such as "mesher" or "builds+mesher". Raises OptionError for an unknown kind."""
    kinds = text.split("+")
    if not set(kinds) <= set(known):
        raise OptionError(f"shift should be one or several of {', '.join(known)}, joined by +, got {text!r}")
    return frozenset(kinds)


def lost_parts(rng: np.random.Generator) -> set[tuple[str, int]]:
    """One to three losses, as `Body.shape` takes them."""
    lost: set[tuple[str, int]] = set()
    for i in rng.choice(len(_LOSSES), rng.integers(1, 4), replace=False):
        parts, sides = _LOSSES[i]
        side = int(rng.choice(sides))
        lost |= {(part, side) for part in parts}
    return lost


def remesh(
    shape: Shape, skin: Surface, mesher: str, count: int, rng: np.random.Generator, damage: float = 1.0
) -> Surface | None:
    """A surface by one of the MESHERS. None if that fails.

    damage: factor of the noise and of the radii of the holes of a scan

    adaptive: `count` vertices, with triangles whose area is proportional to the square of the thickness of a part
    decimated: 750 vertices, by edge collapses in the order of their quadric error
    subdivided: 300 vertices by the same, and then each triangle is split into four at the midpoints of its edges
    scan: dense where the surface faces one of two scanners, with noise along the normals, and holes, most of them where
        it faces neither
    """
    if mesher == "adaptive":
        thickness = shape.radii.mean(axis=1)[bone_distances(shape, skin[0]).argmin(axis=1)]
        return triangulate(shape, skin, "irregular", count, rng, density=thickness**-2.0)
    if mesher == "scan":
        return _scan(shape, skin, rng, damage)
    decimated = mesher == "decimated"
    small = decimate(make_mesh(*skin), 2 * (_DECIMATED if decimated else _BEFORE_SUBDIVISION))
    if decimated:
        return small.verts, small.faces
    from trimesh.remesh import subdivide

    verts, faces = subdivide(small.verts, small.faces)  # type: ignore[no-untyped-call]
    return np.asarray(verts, np.float64), np.asarray(faces, np.int64)


def _scan(shape: Shape, skin: Surface, rng: np.random.Generator, damage: float) -> Surface | None:
    angle = rng.uniform(0, 2 * np.pi)
    scanners = [
        np.array([np.cos(a), np.sin(a), rng.uniform(-0.2, 0.5)]) for a in (angle, angle + rng.uniform(1.5, 2.5))
    ]
    count, density = int(rng.integers(*_SCAN)), _facing(skin_normals(shape, skin[0]), scanners)
    sampled = triangulate(shape, skin, "irregular", count, rng, density=density)
    if sampled is None:
        return None
    normals = skin_normals(shape, sampled[0])
    hidden = 1 / _facing(normals, scanners)
    centers = rng.choice(len(hidden), rng.integers(*_SCAN_HOLES), replace=False, p=hidden / hidden.sum())
    return _with_noise_and_holes(sampled, normals, centers, rng, damage)


def _with_noise_and_holes(
    surface: Surface, normals: Floats, centers: Ints, rng: np.random.Generator, damage: float
) -> Surface | None:
    """The surface without geodesic balls around `centers`, with noise along the normals.

    Small pieces that lose their connection are left out. None if they are more than 5 % of the triangles.
    """
    verts, faces = surface
    away = dijkstra(edge_graph(verts, faces), directed=False, indices=centers)
    inside = (away < damage * rng.uniform(*_SCAN_RADII, size=(len(centers), 1))).any(axis=0)
    left = faces[~inside[faces].any(axis=1)]
    pieces = connected_components(edge_graph(verts, left), directed=False)[1][left[:, 0]]
    kept = left[pieces == np.bincount(pieces).argmax()]
    if len(kept) < 0.95 * len(left):
        return None
    noise = damage * rng.uniform(*_SCAN_NOISE) * rng.normal(size=(len(verts), 1))
    return with_faces(verts + noise * normals, kept)


def _facing(normals: Floats, scanners: Sequence[Floats]) -> Floats:
    """How dense a scan is at each vertex (V,), from 0.1 to 1."""
    cosines = np.stack([normals @ (scanner / np.linalg.norm(scanner)) for scanner in scanners])
    return np.asarray(0.1 + 0.9 * cosines.max(axis=0).clip(0) ** 2, np.float64)
