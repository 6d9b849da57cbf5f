"""What users and files give: arrays, normals, and objects of trimesh, PyTorch Geometric and others like them."""

from __future__ import annotations

import reprlib
import sys
import warnings
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from diffnet.geometry.errors import IN_BRACKETS, MeshError, OptionError, raised_as

NormalsRule: TypeAlias = Literal["file", "geometry"]
NORMALS_RULES: tuple[NormalsRule, ...] = get_args(NormalsRule)


def on_host(values: Any) -> Any:
    """A tensor as a NumPy array. Other values are returned as they are."""
    torch = sys.modules.get("torch")  # if the values are a tensor, PyTorch is loaded
    if torch is None or not isinstance(values, torch.Tensor):
        return values
    values = values.detach().cpu()
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()  # NumPy has no bfloat16


def warn_of_gradients(*sources: Any, stacklevel: int = 4) -> None:
    """Warn if meshes, arrays or matrices require a gradient, which a `Mesh` and its operators don't pass on."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.is_grad_enabled():
        return
    attributes = [getattr(source, name, None) for source in sources for name in ("pos", "vertices", "normal", "values")]
    parts = [part for each in (*sources, *attributes) for part in (each if isinstance(each, tuple) else (each,))]
    if any(isinstance(part, torch.Tensor) and part.requires_grad for part in parts):
        text = "a tensor requires a gradient, which a mesh and its operators don't pass on. "
        advice = "assemble of diffnet.geometry does; write .detach() if none is needed"
        warnings.warn(text + advice, stacklevel=stacklevel)


def real_array(name: str, values: Any) -> NDArray[np.float64]:
    """An array, a tensor or a list as a new array. Raises ValueError, which begins with the name, if that can't be."""
    place = f"{name} are not an array of numbers"
    with raised_as(ValueError, place, TypeError, ValueError, OverflowError, form=IN_BRACKETS):
        array = on_host(values)
        if np.iscomplexobj(array):
            raise ValueError("they are complex")
        return np.array(array, np.float64)


class Source(NamedTuple):
    """Vertices (V, 3), faces (F, 3) or None, not yet checked, a name for messages, and normals (V, 3) or None."""

    verts: Any
    faces: Any
    name: str
    normals: Any = None


def source_of(value: Any) -> Source | None:
    """The vertices and faces of an object, or None if it has none. Raises ValueError if it can't be one mesh.

    Scenes of trimesh are concatenated. Other objects need `vertices` and `faces`, or `pos` and `face` (3, F) and
    perhaps `normal`, as PyTorch Geometric's `Data` has them.
    """
    # Importing trimesh takes a quarter of a second. If it isn't loaded yet, the value can't be a trimesh object.
    if "trimesh" in sys.modules:
        import trimesh

        if isinstance(value, trimesh.Trimesh):
            return Source(value.vertices, value.faces, "trimesh object")
        if isinstance(value, trimesh.PointCloud):
            return Source(value.vertices, None, "trimesh object")
        if isinstance(value, trimesh.Scene):
            return Source(*scene_arrays(value), "trimesh scene")
    name = f"{type(value).__name__} object"
    if isinstance(value, type):
        return None
    if hasattr(value, "pos") and hasattr(value, "face"):
        if value.pos is None:
            raise ValueError("no positions (`pos` is None)")
        return Source(value.pos, _columns(value), name, getattr(value, "normal", None))
    if hasattr(value, "vertices") and hasattr(value, "faces"):
        return Source(value.vertices, value.faces, name)
    return None


def scene_arrays(scene: Any) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Vertices (V, 3) and triangles (F, 3) of a trimesh.Scene, in its coordinates.

    The geometries follow each other in the scene's order, each once for every node that shows it. Raises ValueError
    for a scene without geometry, and for geometry that is neither a mesh nor a point cloud.
    """
    import trimesh

    verts, faces, count = [np.zeros((0, 3))], [np.zeros((0, 3), np.int64)], 0
    nodes: dict[str, list[str]] = {}
    for node in scene.graph.nodes_geometry:
        nodes.setdefault(scene.graph[node][1], []).append(node)
    for name, geometry in scene.geometry.items():
        if not isinstance(geometry, (trimesh.Trimesh, trimesh.PointCloud)):
            raise ValueError(f"the scene holds {name!r}, a {type(geometry).__name__}. Remove all but meshes from it")
        triangles = np.asarray(geometry.faces if isinstance(geometry, trimesh.Trimesh) else faces[0], np.int64)
        for node in nodes.get(name, []):
            matrix = np.asarray(scene.graph[node][0], np.float64)
            points = np.asarray(geometry.vertices, np.float64)
            if not np.array_equal(matrix, np.eye(4)):
                points = points @ matrix[:3, :3].T + matrix[:3, 3]
            mirrored = np.linalg.det(matrix[:3, :3]) < 0
            bad = ((triangles < 0) | (triangles >= len(points))).any()
            if bad:
                raise ValueError(f"{name!r} has {len(points)} vertices, but its faces have indices out of range")
            verts.append(points)
            faces.append((triangles[:, ::-1] if mirrored else triangles) + count)
            count += len(points)
    if count == 0:
        raise ValueError("the scene is empty: no node shows a mesh")
    return np.concatenate(verts), np.concatenate(faces)


def _columns(data: Any) -> Any:
    """The faces (F, 3) of an object that has them as columns."""
    if getattr(data, "num_graphs", 1) != 1:
        raise ValueError(f"a batch of {data.num_graphs} meshes. Pass its meshes: precompute_all(batch.to_data_list())")
    if data.face is None:
        if getattr(data, "edge_index", None) is not None:
            raise ValueError("edges but no faces (`face` is None). For a point cloud, pass (data.pos, None)")
        return None
    shape = tuple(getattr(data.face, "shape", ()))
    if len(shape) != 2 or shape[0] not in (3, 4):
        raise ValueError(f"`face` should have shape (3, F), shape is {shape}")
    return data.face.T


def unit_normals(normals: NDArray[np.float64] | None) -> NDArray[np.float64] | None:
    """Normals (V, 3) of length 1. Rows that are zero or not finite become 0. None if no row is left."""
    if normals is None:
        return None
    rows = np.where(np.isfinite(normals).all(axis=1, keepdims=True), normals, 0.0)
    # Squares of very small or very large numbers underflow or overflow.
    largest = np.abs(rows).max(axis=1, keepdims=True, initial=0)
    rows = rows / np.where(largest > 0, largest, 1.0)
    unit = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1.0)
    return unit if unit.any() else None


def mean_normals(normals: NDArray[np.float64], place: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """The normals (count, 3) of vertices that have several: their mean, of length 1, or 0 if there is none.

    normals: (N, 3) of length 1 or 0
    place: (N,) the vertex of each normal

    Where the normals of a vertex cancel out, the first one is used.

    >>> mean_normals(np.array([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, -1]]), np.array([0, 0, 1, 1]), 2).round(3)
    array([[0.707, 0.707, 0.   ],
           [0.   , 0.   , 1.   ]])
    """
    present = normals.any(axis=1)
    normals, place = normals[present], place[present]
    sums = np.stack([np.bincount(place, normals[:, i], count) for i in range(3)], axis=1)
    firsts = np.zeros((count, 3))
    firsts[place[::-1]] = normals[::-1]  # the last write to a vertex wins
    size = np.linalg.norm(sums, axis=1, keepdims=True)
    cancelled = size < 1e-3 * np.bincount(place, minlength=count)[:, None]
    return np.where(cancelled, firsts, sums / np.where(size > 0, size, 1.0))


def user_normals(array: Any, count: int, name: str) -> NDArray[np.float64]:
    """Normals (V, 3) of length 1 from what a user gives: an array, a tensor or a list.

    count: V
    name: the mesh, for messages

    Raises MeshError for another shape, and for normals that are zero or not finite.
    """
    normals = normals_array(array, count, name)
    unit = unit_normals(normals)
    usable = np.zeros(count, bool) if unit is None else unit.any(axis=1)
    bad = np.flatnonzero(~usable)
    if unit is None or len(bad):
        raise MeshError(
            f"{name}: normals should be finite and not zero, but {len(bad)} are not; the first is normals[{bad[0]}] = "
            f"{normals[bad[0]].tolist()}"
        )
    return unit


def normals_array(array: Any, count: int, name: str) -> NDArray[np.float64]:
    """Normals (V, 3) as they are given. For arguments and errors see `user_normals`."""
    with raised_as(MeshError, name, ValueError):
        normals = real_array("normals", array)
    if normals.shape != (count, 3):
        raise MeshError(
            f"{name}: normals should have shape ({count}, 3), one for each vertex, shape is {normals.shape}"
        )
    return normals


def check_normals_rule(rule: Any, others: str = "") -> None:
    """Raise OptionError for a rule that is neither None nor one of NORMALS_RULES.

    others: further values that are allowed, for the message
    """
    if rule is not None and not (isinstance(rule, str) and rule in NORMALS_RULES):
        names = " or ".join(f'"{name}"' for name in NORMALS_RULES)
        raise OptionError(f"normals should be {others}None, {names}, got {reprlib.repr(rule)}")
