"""Values on a surface: labels, scalars or colors at its vertices, faces or edges."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from diffnet.geometry.elements.elements import check_elements, file_edges, on_triangles
from diffnet.geometry.mesh.mesh import mesh_edges
from diffnet.geometry.mesh.objects import on_host
from diffnet.viz.palette import UNLABELED_COLOR
from diffnet.viz.surface import Surface, ValuesAt

Kind: TypeAlias = Literal["labels", "scalars", "colors"]

MISSING_COLOR = UNLABELED_COLOR  # of scalars and colors that are NaN
PLAIN_COLOR = (150, 172, 196)  # of a surface without values


class Field(NamedTuple):
    """Checked values on a surface.

    name: for legends
    at: the elements that the values belong to
    values: labels (N,) int64, scalars (N,) float64 or colors (N, 3) uint8
    """

    name: str
    kind: Kind
    at: ValuesAt
    values: NDArray[Any]


def make_field(kind: Kind, name: str, values: Any, surface: Surface, at: ValuesAt | None = None) -> Field:
    """Check values and find the elements that they belong to.

    values: arrays, tensors on any device, or lists. Labels (N,) are integers or bools. Scalars (N,) are real numbers.
        Colors (N, 3) or (N, 4) are integers from 0 to 255 or floats from 0 to 1; the fourth column is ignored.
    at: the elements. By default the number N decides: vertices, else faces, else edges in the order of `mesh_edges`.
        Faces and edges are those of the mesh file or those of its triangles, see `on_triangles`.

    Raises ValueError, which names the values, for another shape, dtype or range.
    """
    try:
        array = np.asarray(on_host(values))
    except ValueError as e:
        raise ValueError(f"{name}: expected an array of numbers ({e})") from e
    row = array.shape[1:]
    if array.ndim == 0 or (row not in ((3,), (4,)) if kind == "colors" else row != ()):
        expected = "(N, 3)" if kind == "colors" else "(N,)"
        raise ValueError(f"{name}: {kind} should have shape {expected}, shape is {array.shape}")
    at = elements_of(name, len(array), surface, at)
    if kind == "labels":
        if array.dtype.kind not in "biu" and array.size:
            what = f"labels should be integers, dtype is {array.dtype}"
            raise ValueError(f"{name}: {what}. Draw other numbers as scalars")
        if array.max(initial=0) > np.iinfo(np.int64).max:
            raise ValueError(f"{name}: {array.max()} is beyond 2^63")
        array = array.astype(np.int64)
    elif array.dtype.kind not in "biuf":
        raise ValueError(f"{name}: {kind} should be real numbers, dtype is {array.dtype}")
    else:
        array = _of_255(name, array[:, :3]) if kind == "colors" else array.astype(np.float64)
    if surface.mesh is not None:
        array = on_triangles(surface.mesh, array, at)  # which fills cuts by the dtype
    if kind == "colors":
        missing = np.isnan(array).any(axis=1, keepdims=True)
        array = np.where(missing, MISSING_COLOR, np.where(missing, 0, array)).astype(np.uint8)
    return Field(name, kind, at, array)


def elements_of(name: str, count: int, surface: Surface, at: ValuesAt | None = None) -> ValuesAt:
    """The elements that `count` values belong to: `at`, else the first of vertices, faces and edges with this number.

    Raises ValueError, which names the values and both numbers, if none fits.
    """
    if at is not None:
        check_elements(at)
    verts, faces = len(surface.verts), len(surface.faces)
    if not faces:
        if at not in (None, "vertices"):
            raise ValueError(f"{name}: a point cloud has no {at}")
        if count != verts:
            raise ValueError(f"{name}: {count} values do not fit {verts} points")
        return "vertices"
    if at != "edges" and count == verts and at != "faces":
        return "vertices"
    mesh = surface.mesh
    if at in (None, "faces") and count in (faces, faces if mesh is None else mesh.polygon_count):
        return "faces"
    edges = len(mesh_edges(surface.faces))
    if at in (None, "edges") and count in (edges, edges if mesh is None else len(file_edges(mesh))):
        return "edges"
    counts = {"vertices": verts, "faces": faces, "edges": edges}
    fitting = f"{counts[at]} {at}" if at else f"{verts} vertices, {faces} faces or {edges} edges"
    raise ValueError(f"{name}: {count} values do not fit {fitting}")


def _of_255(name: str, array: NDArray[Any]) -> NDArray[np.float64]:
    """Colors (N, 3) as numbers from 0 to 255 or NaN."""
    top = 1 if array.dtype.kind in "bf" else 255
    numbers = array[~np.isnan(array)].astype(np.float64)
    low, high = numbers.min(initial=0), numbers.max(initial=0)
    if low < 0 or high > top:
        raise ValueError(f"{name}: {array.dtype} colors should be from 0 to {top}, but run from {low:g} to {high:g}")
    return array.astype(np.float64) if top == 255 else (array.astype(np.float64) * 255).round()
