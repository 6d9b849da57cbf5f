"""Triangulations of a figure's skin in several styles, holes in them, and points without triangles."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import connected_components, dijkstra
from scipy.spatial import cKDTree
from scipy.spatial.transform import Rotation

from diffnet.data.synthetic.shape import (
    BLEND,
    PARTS,
    REACH,
    Floats,
    Shape,
    bone_distance,
    bone_distances,
    skin_distance,
    skin_gradient,
)

Ints: TypeAlias = NDArray[np.int64]
Surface: TypeAlias = "tuple[Floats, Ints]"

# raw: marching cubes on a randomly rotated grid; even: triangles of about equal size; irregular: triangles of all
# sizes; adaptive: smaller triangles on thin parts
STYLES = ("raw", "even", "irregular", "adaptive")

_FINE = 0.012
_COARSE = (0.0305, 0.034)
_LLOYD_STEPS = {"even": 5, "irregular": 1, "adaptive": 3}
_HOLE_PARTS = ("head", "torso", "thigh")
_HOLE_RADII = (0.025, 0.05)
_ATTEMPTS = 10


def polygonize(shape: Shape, spacing: float = _FINE) -> Surface | None:
    """The skin by marching cubes, oriented outward. None if it is not one closed surface of genus 0."""
    reach = shape.radii.max() + shape.bulge.max() + REACH + spacing
    low = np.minimum(shape.starts, shape.ends).min(axis=0) - reach
    high = np.maximum(shape.starts, shape.ends).max(axis=0) + reach
    axes = [np.arange(a, b, spacing) for a, b in zip(low, high, strict=True)]
    total = np.full([len(a) for a in axes], np.exp(-REACH / BLEND))
    for bone in range(len(shape.parts)):
        box = _grid_box(shape, bone, axes)
        x, y, z = (a[b] for a, b in zip(axes, box, strict=True))
        total[box] += np.exp(-bone_distance(shape, bone, x[:, None, None], y[:, None], z) / BLEND)
    field = -BLEND * np.log(total)
    # If the skin passes close to a grid point, marching cubes makes slivers. This keeps it a little away.
    field = np.where(np.abs(field) < 0.1 * spacing, np.copysign(0.1 * spacing, field), field)
    from skimage.measure import marching_cubes  # slow to import, and only this data set needs it

    verts, faces, _, _ = marching_cubes(  # type: ignore[no-untyped-call]
        field, 0.0, spacing=(spacing,) * 3, gradient_direction="descent"
    )
    verts, faces = verts.astype(np.float64) + low, faces.astype(np.int64)
    return (verts, faces) if _is_sphere(len(verts), faces) else None


def triangulate(
    shape: Shape,
    skin: Surface,
    style: str,
    count: int,
    rng: np.random.Generator,
    raw_spacing: tuple[float, float] = _COARSE,
    density: Floats | None = None,
) -> Surface | None:
    """One closed surface of genus 0 in one of the STYLES. None if that fails.

    skin: the result of `polygonize`
    count: approximate number of vertices; "raw" ignores it, because its grid decides
    raw_spacing: the range of the spacing of this grid
    density: (V,) at the vertices of the skin, instead of that of the style
    """
    if style == "raw":
        turn = Rotation.from_quat(rng.normal(size=4))
        raw = polygonize(shape.rotated(turn), rng.uniform(*raw_spacing))
        return None if raw is None else (turn.inv().apply(raw[0]), raw[1])
    coarse = _coarsen(shape, skin, style, count, rng, density)
    if coarse is None or style != "even":
        return coarse
    relaxed = _relax(shape, *coarse)
    return coarse if _bad_triangles(shape, relaxed, coarse[1]).any() else (relaxed, coarse[1])


def cut_holes(shape: Shape, surface: Surface, rng: np.random.Generator) -> Surface | None:
    """Cut one or two holes into the wide parts of a closed surface. None if there is no room for them."""
    verts, faces = surface
    nearest = shape.parts[bone_distances(shape, verts).argmin(axis=1)]
    wide = np.flatnonzero(np.isin(nearest, [PARTS.index(p) for p in _HOLE_PARTS]))
    graph = edge_graph(verts, faces)
    for _ in range(_ATTEMPTS):
        holes = int(rng.integers(1, 3))
        away = dijkstra(graph, directed=False, indices=rng.choice(wide, holes, replace=False))
        inside = (away < rng.uniform(*_HOLE_RADII, size=(holes, 1))).any(axis=0)
        cut = with_faces(verts, faces[~inside[faces].any(axis=1)])
        if _is_sphere(len(cut[0]), cut[1], holes):
            return cut
    return None


def with_faces(verts: Floats, faces: Ints) -> Surface:
    """The surface of these faces, without vertices that they don't use."""
    used, compact = np.unique(faces, return_inverse=True)
    return verts[used], compact.reshape(-1, 3)


def skin_normals(shape: Shape, verts: Floats) -> Floats:
    """Unit normals (V, 3) of the skin."""
    slopes = skin_gradient(shape, verts)
    return np.asarray(slopes / np.linalg.norm(slopes, axis=1, keepdims=True), np.float64)


def sample_points(shape: Shape, skin: Surface, count: int, rng: np.random.Generator) -> Surface:
    """`count` random points, uniform by area over the skin, and no faces."""
    corners = skin[0][skin[1]]
    areas = np.linalg.norm(face_normals(*skin), axis=1)
    weights = rng.dirichlet((1, 1, 1), size=count)
    chosen = rng.choice(len(corners), count, p=areas / areas.sum())
    return _onto_skin(shape, np.einsum("pc,pcx->px", weights, corners[chosen])), np.zeros((0, 3), np.int64)


def _grid_box(shape: Shape, bone: int, axes: list[Floats]) -> tuple[slice, ...]:
    """The part of the grid within REACH of a bone. It is a small part, which makes `polygonize` fast."""
    ends = np.stack([shape.starts[bone], shape.ends[bone]])
    radius = shape.radii[bone].max() + shape.bulge[bone] + REACH
    low, high = ends.min(axis=0) - radius, ends.max(axis=0) + radius
    return tuple(slice(*np.searchsorted(a, [lo, hi])) for a, lo, hi in zip(axes, low, high, strict=True))


def _coarsen(
    shape: Shape, skin: Surface, style: str, count: int, rng: np.random.Generator, density: Floats | None
) -> Surface | None:
    """The dual of about `count` geodesic Voronoi cells of the fine skin."""
    verts, faces = skin
    graph = edge_graph(verts, faces)
    seeds = _spread_seeds(shape, verts, style, count, rng, density)
    for _ in range(_ATTEMPTS):
        # With distances along the surface, every cell is connected, and the two sides of a hand stay separate.
        _, _, nearest = dijkstra(graph, directed=False, indices=seeds, min_only=True, return_predecessors=True)
        cells = np.searchsorted(seeds, nearest)[faces]
        a, b, c = cells.T
        dual = cells[(a != b) & (b != c) & (c != a)]
        surplus = _surplus_cells(len(seeds), dual)
        if not len(surplus):
            points = _onto_skin(shape, verts[seeds])
            bad = dual[_bad_triangles(shape, points, dual)]
            if not len(bad):
                return (points, dual) if _is_sphere(len(seeds), dual) else None
            surplus = np.unique(rng.permuted(bad, axis=1)[:, 0])
        seeds = np.delete(seeds, surplus)
    return None


def _spread_seeds(
    shape: Shape, verts: Floats, style: str, count: int, rng: np.random.Generator, density: Floats | None
) -> Ints:
    """About `count` vertices in ascending order, drawn at random and then spread by Lloyd's algorithm."""
    if density is None:
        density = np.ones(len(verts))
    if style == "adaptive":
        density = 1 / shape.radii.mean(axis=1)[bone_distances(shape, verts).argmin(axis=1)]
    normals = skin_gradient(shape, verts)
    # With normals as additional coordinates, the two sides of a thin part do not share a cluster.
    embedded = np.hstack([verts, 0.03 * normals / np.linalg.norm(normals, axis=1, keepdims=True)])
    tree = cKDTree(embedded)
    seeds = np.sort(rng.choice(len(verts), count, replace=False, p=density / density.sum()))
    for _ in range(_LLOYD_STEPS[style]):
        owner = cKDTree(embedded[seeds]).query(embedded)[1]
        mass = np.bincount(owner, density)
        centers = np.stack([np.bincount(owner, density * x) / mass for x in embedded.T], axis=1)
        seeds = np.unique(tree.query(centers)[1])
    return seeds


def _surplus_cells(count: int, dual: Ints) -> Ints:
    """The cells to remove so that the dual becomes a manifold.

    A cell with fewer than three neighbors is removed, because its two neighbors would meet along two borders. For every
    other edge without exactly two triangles, the end with fewer neighbors is removed.
    """
    edges, uses = _edges(dual)
    neighbors = np.bincount(edges.ravel(), minlength=count)
    ends = edges[uses != 2]
    fewer = ends[np.arange(len(ends)), neighbors[ends].argmin(axis=1)]
    return np.union1d(fewer, np.flatnonzero(neighbors < 3))


def _relax(shape: Shape, verts: Floats, faces: Ints, steps: int = 4) -> Floats:
    """Move vertices along the skin, halfway to the mean of their neighbors in each step."""
    graph = edge_graph(verts, faces)
    graph.data[:] = 1.0
    graph = graph + graph.T
    neighbors = graph.sum(axis=1)[:, None]
    for _ in range(steps):
        normals = skin_normals(shape, verts)
        move = (graph @ verts) / neighbors - verts
        move -= (move * normals).sum(axis=1, keepdims=True) * normals
        verts = _onto_skin(shape, verts + 0.5 * move, steps=1)
    return verts


def _onto_skin(shape: Shape, points: Floats, steps: int = 2) -> Floats:
    """Move points onto the skin by Newton's method along the gradient."""
    for _ in range(steps):
        slope = skin_gradient(shape, points)
        points = points - (skin_distance(shape, points) / (slope**2).sum(axis=1))[:, None] * slope
    return points


def _bad_triangles(shape: Shape, verts: Floats, faces: Ints) -> NDArray[np.bool_]:
    """A mask (F,) of triangles that are needles, or that face against the skin's normals at their corners."""
    normals = face_normals(verts, faces)
    outward = skin_gradient(shape, verts)[faces].sum(axis=1)
    longest = np.linalg.norm(verts[faces] - verts[np.roll(faces, 1, axis=1)], axis=2).max(axis=1)
    folded = (normals * outward).sum(axis=1) <= 0
    return np.asarray(folded | (np.linalg.norm(normals, axis=1) < 0.02 * longest**2), np.bool_)


def face_normals(verts: Floats, faces: Ints) -> Floats:
    """Normals (F, 3) by the right-hand rule. Their length is twice the area."""
    a, b, c = verts[faces].transpose(1, 0, 2)
    return np.cross(b - a, c - a)


def _edges(faces: Ints) -> tuple[Ints, Ints]:
    """The undirected edges (E, 2), and the number of triangles at each (E,)."""
    corners = np.sort(faces[:, [[0, 1], [1, 2], [2, 0]]].reshape(-1, 2), axis=1)
    # Each edge becomes one number. Sorting numbers is several times faster than sorting rows.
    base = faces.max() + 1
    numbers, uses = np.unique(corners[:, 0] * base + corners[:, 1], return_counts=True)
    return np.stack(np.divmod(numbers, base), axis=1), uses


def edge_graph(verts: Floats, faces: Ints) -> csr_array:
    """A sparse matrix (V, V) of edge lengths. Each edge is stored once."""
    edges, _ = _edges(faces)
    lengths = np.linalg.norm(verts[edges[:, 0]] - verts[edges[:, 1]], axis=1)
    return coo_array((lengths, edges.T), shape=(len(verts), len(verts))).tocsr()


def _is_sphere(count: int, faces: Ints, holes: int = 0) -> bool:
    """Whether the triangles form one surface of genus 0 with this many holes that uses all `count` vertices."""
    edges, uses = _edges(faces)
    border = np.bincount(edges[uses == 1].ravel(), minlength=count)
    graph = coo_array((np.ones(len(edges)), edges.T), shape=(count, count))
    return (
        bool((uses <= 2).all())
        and bool(np.isin(border, (0, 2)).all())
        and count - len(edges) + len(faces) == 2 - holes
        and connected_components(graph, directed=False)[0] == 1
    )
