"""Vertices and faces of objects of other libraries: trimesh, PyTorch Geometric and others with the same attributes."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


def on_host(values: Any) -> Any:
    """A tensor as a NumPy array. Other values are returned as they are."""
    torch = sys.modules.get("torch")  # if the values are a tensor, PyTorch is loaded
    if torch is None or not isinstance(values, torch.Tensor):
        return values
    values = values.detach().cpu()
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()  # NumPy has no bfloat16


def real_array(name: str, values: Any) -> NDArray[np.float64]:
    """An array, a tensor or a list as a new array. Raises ValueError, which begins with the name, if that can't be."""
    try:
        given = on_host(values)
        if np.iscomplexobj(given):
            raise ValueError("they are complex")
        return np.array(given, np.float64)
    except (TypeError, ValueError, OverflowError) as e:
        raise ValueError(f"{name} are not an array of numbers ({e})") from e


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
