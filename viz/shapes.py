"""What `picture` and `page` share: shapes with their fields and arrows, and the scales of their scalars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, get_args

import numpy as np

from diffnet.geometry.elements.elements import on_triangles
from diffnet.geometry.mesh.mesh import MeshLike
from diffnet.geometry.mesh.objects import on_host
from diffnet.geometry.mesh.polygons import Floats, Ints
from diffnet.viz.fields import PLAIN_COLOR, Field, Kind, elements_of, make_field
from diffnet.viz.palette import Scale, make_scale
from diffnet.viz.surface import Surface, ValuesAt, is_operators, surface_of, unit

Meshes: TypeAlias = "MeshLike | list[Any]"
_MAX_ARROWS = 400
_SIDES = 6


class Shape(NamedTuple):
    """A surface with its title, its fields, of which there is at least one, and its arrows.

    arrows: by the name of the field beside which they are drawn, or by "" if they are always drawn
    """

    title: str
    surface: Surface
    fields: list[Field]
    arrows: dict[str, Surface]


def make_shapes(
    mesh: Meshes, at: ValuesAt | Mapping[str, ValuesAt] | None, titles: str | Sequence[str] | None, **values: Any
) -> list[Shape]:
    """The shapes of one mesh or of a list of meshes. `picture` explains the arguments.

    values: `labels`, `scalars`, `colors`, `vectors` and `frames`

    A surface without values gets a field of kind "colors" whose name is empty.
    """
    meshes = mesh if isinstance(mesh, list) else [mesh]
    if not meshes:
        raise ValueError("expected a mesh or a list of meshes, got an empty list")
    count = len(meshes) if isinstance(mesh, list) else None
    columns = {name: _per_shape(name, value, count) for name, value in values.items()}
    names = [""] * len(meshes) if titles is None else [titles] if isinstance(titles, str) else [*titles]
    if len(names) != len(meshes):
        raise ValueError(f"titles: {len(names)} titles do not fit {len(meshes)} shapes")
    shapes = [
        _make_shape(str(names[i]), one, {name: column[i] for name, column in columns.items()}, at)
        for i, one in enumerate(meshes)
    ]
    check_names("at", at, (field.name for shape in shapes for field in shape.fields))
    return shapes


def check_names(argument: str, by_name: Any, names: Iterable[str]) -> None:
    """Raises ValueError if an argument is a mapping and names values that are not there."""
    unknown = sorted({*by_name} - {*names}) if isinstance(by_name, Mapping) else []
    if unknown:
        raise ValueError(f"{argument}: there are no values named {', '.join(map(repr, unknown))}")


def scales_of(shapes: Sequence[Shape], color_map: Any, range: Any) -> dict[str, Scale]:
    """The scale of the scalars of each name, for all shapes together.

    color_map, range: see `make_scale`; for each name, if they are mappings
    """
    values: dict[str, list[Any]] = {}
    for shape in shapes:
        for field in shape.fields:
            if field.kind == "scalars":
                values.setdefault(field.name, []).append(field.values)
    check_names("color_map", color_map, values)
    check_names("range", range, values)
    return {
        name: make_scale(
            np.concatenate(parts),
            color_map.get(name, "viridis") if isinstance(color_map, Mapping) else color_map,
            range.get(name) if isinstance(range, Mapping) else range,
        )
        for name, parts in values.items()
    }


def _per_shape(name: str, value: Any, count: int | None) -> list[Any]:
    """The value for each of `count` shapes. None means that there is one shape, and not a list."""
    if count is None:
        return [value]
    if value is None:
        return [None] * count
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{name}: for a list of {count} meshes, expected a list, got {type(value).__name__}")
    if len(value) != count:
        raise ValueError(f"{name}: a list of {len(value)} does not fit {count} meshes")
    return list(value)


def _make_shape(
    title: str, mesh: Any, arguments: dict[str, Any], at: ValuesAt | Mapping[str, ValuesAt] | None
) -> Shape:
    surface = surface_of(mesh)
    fields = []
    kinds: tuple[Kind, ...] = get_args(Kind)
    for kind in kinds:
        values = arguments[kind]
        if values is None:
            continue
        named = values if isinstance(values, Mapping) else {kind: values}
        places = at if isinstance(at, Mapping) else dict.fromkeys(named, at)
        fields += [make_field(kind, str(name), each, surface, places.get(name)) for name, each in named.items()]
    if len({field.name for field in fields}) < len(fields):
        raise ValueError(f"two fields have one name: {', '.join(field.name for field in fields)}")
    if not fields:
        plain = np.tile(np.array(PLAIN_COLOR, np.uint8), (len(surface.verts), 1))
        fields = [Field("", "colors", "vertices", plain)]
    vectors = arguments["vectors"]
    by_name = {} if vectors is None else vectors if isinstance(vectors, Mapping) else {"": vectors}
    check_names("vectors", by_name, ["", *(field.name for field in fields)])
    arrows = {name: vector_arrows(surface, each, arguments["frames"]) for name, each in by_name.items()}
    return Shape(title, surface, fields, arrows)


def vector_arrows(surface: Surface, vectors: Any, frames: Any = None) -> Surface:
    """Arrows for vectors at the vertices (V, 3) or faces (F, 3), or for tangent vectors (V, 2) in frames (V, 3, 3).

    frames: the rows of each are tangent x, tangent y and normal; `Operators` stand for their frames

    At most 400 arrows are drawn, evenly spread. They start at the vertices or in the middle of the faces. Their lengths
    are proportional to the vectors; above the 95th percentile of the lengths, all are equally long. Vectors of length
    0, NaN or infinity are left out.

    Raises ValueError for shapes that do not fit.
    """
    arrows = np.asarray(on_host(vectors), np.float64)
    if arrows.ndim != 2 or arrows.shape[1] not in (2, 3):
        raise ValueError(f"vectors: expected shape (N, 3), or (V, 2) with frames, shape is {arrows.shape}")
    if arrows.shape[1] == 2:
        arrows = _in_space(surface, arrows, frames)
    at = elements_of("vectors", len(arrows), surface)
    if at == "edges":
        raise ValueError(f"vectors: {len(arrows)} vectors at edges. Give them at vertices or faces")
    arrows = arrows if surface.mesh is None else on_triangles(surface.mesh, arrows, at)
    points = surface.verts if at == "vertices" else surface.verts[surface.faces].mean(axis=1)
    lengths = np.linalg.norm(arrows, axis=1)
    shown = np.flatnonzero((lengths > 0) & np.isfinite(lengths) & np.isfinite(points).all(axis=1))
    if not len(shown):
        return Surface(np.zeros((0, 3)), np.zeros((0, 3), np.int64))
    longest = float(np.percentile(lengths[shown], 95))
    shown = shown[_spread(points[shown], _MAX_ARROWS)]
    spacing = _spacing(points[shown])
    directions = unit(arrows[shown]) * (np.minimum(lengths[shown] / longest, 1) * 1.6 * spacing)[:, None]
    return arrow_surface(points[shown], directions, 0.055 * spacing)


def arrow_surface(starts: Floats, vectors: Floats, radius: float) -> Surface:
    """Triangles of arrows from starts (N, 3) along vectors (N, 3). Short arrows are thinner than `radius`."""
    length = np.linalg.norm(vectors, axis=1)
    thin = np.minimum(radius, 0.12 * length)
    neck = length - np.minimum(6 * thin, 0.6 * length)
    ahead = unit(vectors)
    helper = np.eye(3)[np.abs(ahead).argmin(axis=1)]
    right = unit(np.cross(ahead, helper))
    up = np.cross(ahead, right)
    angles = 2 * np.pi * np.arange(_SIDES) / _SIDES
    circle = right[:, None] * np.cos(angles)[:, None] + up[:, None] * np.sin(angles)[:, None]  # (N, sides, 3)
    rings = [
        starts[:, None] + along[:, None, None] * ahead[:, None] + wide[:, None, None] * circle
        for along, wide in ((0 * neck, thin), (neck, thin), (neck, 2.6 * thin), (length, 0 * thin))
    ]
    verts = np.stack(rings, axis=1).reshape(-1, 3)
    side = np.arange(len(rings) * _SIDES).reshape(len(rings), _SIDES)
    a, b, c, d = side[:-1], np.roll(side, -1, 1)[:-1], np.roll(side, -1, 1)[1:], side[1:]  # quadrilaterals of rings
    faces = np.concatenate([np.stack([a, b, c], -1).reshape(-1, 3), np.stack([a, c, d], -1).reshape(-1, 3)])
    first = np.arange(len(starts)) * len(rings) * _SIDES
    return Surface(verts, (faces + first[:, None, None]).reshape(-1, 3))


def _in_space(surface: Surface, tangent: Floats, frames: Any) -> Floats:
    """Tangent vectors (V, 2) as vectors (V, 3)."""
    verts = len(surface.verts)
    if len(tangent) != verts:
        raise ValueError(f"vectors: {len(tangent)} tangent vectors do not fit {verts} vertices")
    if frames is None:
        raise ValueError("vectors: tangent vectors (V, 2) need frames, such as frames=operators")
    axes = np.asarray(on_host(frames.frames if is_operators(frames) else frames), np.float64)
    if axes.shape != (verts, 3, 3):
        raise ValueError(f"frames should have shape ({verts}, 3, 3), shape is {axes.shape}")
    return tangent[:, :1] * axes[:, 0] + tangent[:, 1:] * axes[:, 1]


def _spread(points: Floats, most: int) -> Ints:
    """The numbers of at most `most` of the points (N, 3): in each cell of a grid, the point nearest to its center."""
    low, extent = points.min(axis=0), float(np.ptp(points, axis=0).max())
    if len(points) <= most or extent == 0:
        return np.arange(len(points))[:most]
    small, large = extent / most, extent  # sides of a cell; the second is large enough
    for _ in range(12):
        middle = float(np.sqrt(small * large))
        fits = len(np.unique(_cells(points - low, middle))) <= most
        small, large = (small, middle) if fits else (middle, large)
    cells = _cells(points - low, large)
    away = np.linalg.norm((points - low) / large % 1 - 0.5, axis=1)
    order = np.lexsort((away, cells))
    return order[np.unique(cells[order], return_index=True)[1]]


def _cells(points: Floats, side: float) -> Ints:
    """The number of the cell of a grid that holds each of the points (N, 3), which are not negative."""
    x, y, z = (points / side).astype(np.int64).T
    return (x * 2**20 + y) * 2**20 + z


def _spacing(points: Floats) -> float:
    """The typical distance (median) of a point to the nearest other point, at most a tenth of the extent."""
    from scipy.spatial import cKDTree  # imported here because it takes a tenth of a second

    extent = float(np.linalg.norm(np.ptp(points, axis=0))) or 4.0
    if len(points) < 2:
        return 0.1 * extent
    return min(float(np.median(cKDTree(points).query(points, k=2)[0][:, 1])), 0.1 * extent) or 0.02 * extent
