"""Reading and checking meshes and point clouds."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from diffnet.geometry.errors import IN_BRACKETS, MeshError, raised_as
from diffnet.geometry.file_state import settled_state
from diffnet.geometry.mesh.content import check_content, decompress, with_line_feeds
from diffnet.geometry.mesh.formats import READERS, parse
from diffnet.geometry.mesh.gltf import embed_buffers
from diffnet.geometry.mesh.objects import (
    normals_array,
    on_host,
    real_array,
    source_of,
    unit_normals,
    user_normals,
    warn_of_gradients,
)
from diffnet.geometry.mesh.orientation import turned_faces
from diffnet.geometry.mesh.polygons import first_at_position, triangulate
from diffnet.geometry.store.cache import Arrays, cache_key, check_arrays, entry_path, read_entry, write_entry

if TYPE_CHECKING:
    import trimesh
    from torch import Tensor

FORMATS = tuple(READERS)  # each may be followed by .gz
MeshLike: TypeAlias = (
    "str | os.PathLike[str] | Mesh | trimesh.Trimesh | trimesh.PointCloud | trimesh.Scene | tuple[Any, Any]"
    " | HasPositions | HasVertices | NDArray[Any] | Tensor | Sequence[Sequence[float]]"
)
_MAX_COORDINATE = float(np.finfo(np.float32).max)
_keys: dict[Any, str] = {}  # of the entries of files that this process has hashed, by path and state
_READERS_VERSION = 1  # increase when readers find other meshes in files
_STORED = ("verts", "faces", "polygons", "polygon_count", "normals", "sizes", "corners")  # in this order


def mesh_suffix(path: str | os.PathLike[str]) -> str:
    """The extension of a mesh file in lower case, without .gz."""
    return _stem_and_suffix(os.path.basename(path))[1].lower()


def mesh_stem(path: str | os.PathLike[str]) -> str:
    """The name of a mesh file without its extension and .gz."""
    return _stem_and_suffix(os.path.basename(path))[0]


@lru_cache(maxsize=1 << 17)  # a start over a set asks a dozen times for each of its names
def _stem_and_suffix(name: str) -> tuple[str, str]:
    if len(name) > 3 and name[-3:].lower() == ".gz":
        name = name[:-3]
    dot = name.rfind(".")
    if name[dot:].lower() == ".gii":
        dot = max(name.rfind(".", 0, dot), 0) or dot  # .surf.gii and others
    return (name[:dot], name[dot:]) if 0 < dot < len(name) - 1 else (name, "")


class HasPositions(Protocol):
    """An object with positions (V, 3) and faces (3, F) or None, such as `Data` of PyTorch Geometric."""

    @property
    def pos(self) -> Any: ...
    @property
    def face(self) -> Any: ...


class HasVertices(Protocol):
    """An object with vertices (V, 3) and faces (F, 3) or None."""

    @property
    def vertices(self) -> Any: ...
    @property
    def faces(self) -> Any: ...


@dataclass(frozen=True)
class Mesh:
    """A checked triangle mesh, or a point cloud if `faces` is empty.

    verts: (V, 3) float64, all finite, V ≥ 1
    faces: (F, 3) int64, every index in [0, V)
    polygons: (F,) int64, the index of the source's polygon that each triangle was cut from
    polygon_count: the number of polygons of the source, P. Polygons of fewer than three corners count, but give no
        triangle.
    name: where the mesh came from, for messages
    normals: (V, 3) float64 of length 1, the normals at the vertices that the source gives, or None. A vertex for which
        it gives none has 0. `precompute` says when they are used.
    path: the file that it was read from, or None. Own features are looked for beside it.
    sizes, corners: the number of corners (P,) of each polygon of the source, and the vertices of all corners, one
        polygon after the other, int64. None if all polygons are triangles, or if they aren't known.
    """

    verts: NDArray[np.float64]
    faces: NDArray[np.int64]
    polygons: NDArray[np.int64]
    polygon_count: int
    name: str
    normals: NDArray[np.float64] | None = None
    path: str | None = None
    sizes: NDArray[np.int64] | None = None
    corners: NDArray[np.int64] | None = None

    def __repr__(self) -> str:
        return f"Mesh(name={self.name!r}, vertices={len(self.verts)}, faces={len(self.faces)})"

    @property
    def is_point_cloud(self) -> bool:
        return len(self.faces) == 0

    @property
    def has_polygons(self) -> bool:
        """Whether the source has other polygons than triangles, so that triangles don't have their numbers."""
        return not np.array_equal(self.polygons, np.arange(self.polygon_count))

    @property
    def usable_faces(self) -> NDArray[np.int64]:
        """The faces (F', 3) with three distinct corners. The others have no geometry."""
        a, b, c = self.faces.T
        usable = (a != b) & (b != c) & (c != a)
        return self.faces if usable.all() else self.faces[usable]

    @property
    def on_surface(self) -> NDArray[np.bool_]:
        """The vertices (V,) of the surface: those of usable faces. In a point cloud, all are."""
        mask = np.full(len(self.verts), self.is_point_cloud)
        mask[self.usable_faces] = True
        return mask

    @cached_property
    def turned_faces(self) -> NDArray[np.bool_]:
        """The faces (F,) bool that have their other side outside in operators: those of surfaces that are inside out.

        `diffnet.geometry.mesh.orientation` has the rule. The faces keep their corners.
        """
        return turned_faces(self.verts, self.faces)


def load_mesh(source: MeshLike, cache_dir: str | os.PathLike[str] | None = None) -> Mesh:
    """Read and check a mesh or a point cloud.

    source: one of
        a path to an obj, off, ply, stl, glb, gltf, vtk, vtp or vtu file, which may be compressed by gzip (.obj.gz).
        VTK files need ``pip install 'diffnet[pyvista]'``. Cortices as GIFTI (.surf.gii) or of FreeSurfer (lh.pial,
        .white, .inflated, .sphere) need ``pip install 'diffnet[neuro]'``;
        arrays (verts (V, 3), faces (F, 3) or quadrilaterals (F, 4)): NumPy arrays, tensors or lists. For a point
        cloud, faces is None or empty;
        points (V, 3) of a point cloud: a NumPy array, a tensor or a list;
        a trimesh object. The geometries of a scene become one mesh, in the scene's coordinates;
        an object with `vertices` (V, 3) and `faces` (F, 3), or with `pos` (V, 3) and `face` (3, F) and perhaps
        `normal` (V, 3), as PyTorch Geometric's `Data` has them
    cache_dir: a folder for parsed files, identified by their content, so that a file is parsed only once; see
        `precompute`. `diffnet.geometry.file_state` says when a process reads a file again.

    Vertices and polygons keep the order of the source, so labels stored beside it stay valid. Polygons are cut into
    triangles inside of them, which is the fan at the first corner where possible. STL files have no shared vertices, so
    corners with identical coordinates become one vertex, numbered by first appearance. In VTK files, each triangle of a
    strip is a polygon. Normals in PLY files (nx, ny, nz) and OBJ files (vn) are read, and those of a `Data`. If a
    vertex of an OBJ file has several, it gets their mean.

    Raises MeshError for a file that is missing or doesn't parse, an empty mesh, NaN or infinite coordinates,
    coordinates beyond single precision, and an index out of range. A .gz file of more than 2 GiB when unpacked is
    refused, too; the environment variable DIFFNET_MAX_UNPACKED_GIB raises this limit. Reading a text file takes up to
    about 20 times its size in memory. Warns if vertices or normals require a gradient, see `precompute`.

    >>> mesh = load_mesh(([[0, 0, 0], [1, 0, 0], [0, 1, 0]], [[0, 1, 2]]))
    >>> mesh.verts.shape, mesh.faces.tolist(), mesh.is_point_cloud
    ((3, 3), [[0, 1, 2]], False)
    """
    warn_of_gradients(source, stacklevel=3)
    return detached_mesh(source, cache_dir)


def detached_mesh(source: MeshLike, cache_dir: str | os.PathLike[str] | None = None) -> Mesh:
    """`load_mesh` without its warning."""
    if cache_dir is not None and not isinstance(cache_dir, (str, os.PathLike)):
        raise MeshError(
            f"cache_dir should be a folder or None, got {type(cache_dir).__name__}. Pass vertices and faces as one "
            "tuple: load_mesh((verts, faces))"
        )
    if isinstance(source, Mesh):
        return source
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if cache_dir is not None:
            return load_parsed(path, cache_dir)[0]
        suffix, data = read_content(path)
        return replace(_parse(data, suffix, str(path)), path=str(path))
    if isinstance(source, tuple) and len(source) == 2:
        return make_mesh(*source, name="arrays")
    with raised_as(MeshError, f"{type(source).__name__} object", ValueError):
        content = source_of(source)
    if content is not None:
        mesh = make_mesh(content.verts, content.faces, name=content.name)
        if content.normals is None:
            return mesh
        return replace(mesh, normals=unit_normals(normals_array(content.normals, len(mesh.verts), content.name)))
    if is_array(source):
        return make_mesh(source, None, name="points")
    raise MeshError(f"expected a path, a trimesh object or (verts, faces), got {_described(source)}")


def check_several(meshes: Any) -> None:
    """Raises MeshError if a single path or mesh is given where several meshes are expected."""
    if isinstance(meshes, (str, os.PathLike, Mesh)):
        raise MeshError(f"expected a list of meshes, got one, {reprlib.repr(meshes)}; write it in brackets, [mesh]")


def is_array(value: Any) -> bool:
    """Whether a value is an array or a tensor, or a list of points."""
    if not isinstance(value, (list, tuple)):
        return hasattr(value, "shape")
    try:
        return len(value) > 0 and np.shape(value[0]) == (3,)
    except ValueError:  # an item of several lengths, such as vertices and faces
        return False


def _described(source: Any) -> str:
    """Describe a value that is no mesh, with a hint."""
    if isinstance(source, list):
        return f"a list of {len(source)} items. Vertices and faces should be a tuple; precompute_all takes many meshes"
    return f"{type(source).__name__} {reprlib.repr(source)}"


def make_mesh(
    verts: Any,
    faces: Any,
    *,
    name: str = "mesh",
    polygons: Any = None,
    polygon_count: int | None = None,
    normals: Any = None,
) -> Mesh:
    """A `Mesh` of checked arrays. `load_mesh` says what is accepted and raised.

    name: for messages
    polygons, polygon_count: see `Mesh`; by default each face is a polygon. Quadrilaterals (F, 4) have no `polygons`.
    normals: (V, 3), finite and not zero, of any length; or None
    """
    with raised_as(MeshError, name, ValueError):
        v = real_array("vertices", verts)
    if v.ndim != 2 or v.shape[1] != 3:
        hint = ". Pass its transpose" if v.ndim == 2 and v.shape[0] == 3 else ""
        raise MeshError(f"{name}: vertices should have shape (V, 3), shape is {v.shape}{hint}")
    if len(v) == 0:
        raise MeshError(f"{name}: the mesh is empty (0 vertices)")
    # Norms and areas of larger coordinates overflow, and operators are single precision.
    if not (np.abs(v) <= _MAX_COORDINATE).all():
        bad = np.flatnonzero(~np.isfinite(v).all(axis=1))
        if len(bad):
            raise MeshError(
                f"{name}: NaN or infinite coordinates at {len(bad)} of {len(v)} vertices, the first is vertex "
                f"{bad[0]}: {v[bad[0]]}"
            )
        worst = int(np.abs(v).max(axis=1).argmax())
        raise MeshError(
            f"{name}: coordinates up to {np.abs(v).max():.3g} are beyond single precision ({_MAX_COORDINATE:.3g}), the "
            f"largest is at vertex {worst}. Scale the mesh down, or correct this vertex"
        )
    unit = None if normals is None else user_normals(normals, len(v), name)
    with raised_as(MeshError, f"{name}: faces are not an array of numbers", TypeError, ValueError, form=IN_BRACKETS):
        f = np.asarray([] if faces is None else on_host(faces))
    if f.ndim > 0 and len(f) == 0:
        return Mesh(v, np.zeros((0, 3), np.int64), np.zeros(0, np.int64), polygon_count or 0, name, unit)
    if f.ndim != 2 or f.shape[1] not in ((3, 4) if polygons is None else (3,)):
        hint = ". Pass its transpose" if f.ndim == 2 and f.shape[0] in (3, 4) else ""
        raise MeshError(
            f"{name}: faces should have shape (F, 3), or (F, 4) for quadrilaterals, shape is {f.shape}{hint}"
        )
    if not np.issubdtype(f.dtype, np.integer):
        raise MeshError(f"{name}: faces should be integers, dtype is {f.dtype}")
    f = f.astype(np.int64)
    bad = np.flatnonzero(((f < 0) | (f >= len(v))).any(axis=1))
    if len(bad):
        raise MeshError(
            f"{name}: face {bad[0]} is {f[bad[0]].tolist()}, but vertex indices run from 0 to {len(v) - 1} "
            f"({len(bad)} faces out of range)"
        )
    if polygon_count is None:
        polygon_count = len(f)
    if f.shape[1] == 3:
        p = np.arange(len(f)) if polygons is None else np.asarray(polygons, np.int64)
        return Mesh(v, f, p, polygon_count, name, unit)
    sizes, corners = np.full(len(f), 4), f.reshape(-1)
    return Mesh(v, *triangulate(v, sizes, corners), polygon_count, name, unit, None, sizes, corners)


def mesh_edges(faces: NDArray[np.int64]) -> NDArray[np.int64]:
    """The undirected edges (E, 2), smaller index first, of triangles (F, 3).

    Edges are numbered by first appearance, walking through the faces corner by corner (0-1, 1-2, 2-0). The published
    labels of edges (MeshCNN, Hanocka et al. 2019) have the same order.

    >>> mesh_edges(np.array([[0, 1, 2], [2, 1, 3]])).tolist()
    [[0, 1], [1, 2], [0, 2], [1, 3], [2, 3]]
    """
    faces = np.asarray(faces, np.int64)  # smaller types don't hold products of two indices
    corners = np.sort(faces[:, [[0, 1], [1, 2], [2, 0]]].reshape(-1, 2), axis=1)
    # Combine the two indices of an edge into one number: sorting numbers is several times faster than sorting rows.
    _, first = np.unique(corners[:, 0] * (faces.max(initial=0) + 1) + corners[:, 1], return_index=True)
    return corners[np.sort(first)]


def load_parsed(path: Path, cache_dir: str | os.PathLike[str]) -> tuple[Mesh, Path]:
    """`load_mesh` of a file, and the entry that holds the parsed file, unless it can't be written."""
    name = str(path)
    earlier = parsed_entry(path, cache_dir)
    if earlier is not None and (mesh := stored_mesh(earlier, name, name)) is not None:
        return mesh, earlier
    state = settled_state(path)
    suffix, data = read_content(path)
    key = cache_key({"file": np.frombuffer(data, np.uint8)}, suffix=suffix, readers=_READERS_VERSION)
    if state is not None and state == settled_state(path):
        _keys[name, state] = key
    entry = entry_path(cache_dir, key, "mesh")
    # The known one was just found missing or damaged.
    mesh = stored_mesh(entry, name, name) if entry != earlier else None
    if mesh is None:
        mesh = replace(_parse(data, suffix, name), path=name)
        store_mesh(entry, mesh)
        mesh = stored_mesh(entry, name, name) or mesh  # mapped files don't count as memory of a process
    return mesh, entry


def parsed_entry(path: Path, cache_dir: str | os.PathLike[str]) -> Path | None:
    """The entry of a parsed file, if this process has hashed the file before and it hasn't changed since."""
    key = _keys.get((str(path), settled_state(path)))
    return None if key is None else entry_path(cache_dir, key, "mesh")


def stored_mesh(entry: Path, name: str, path: str | None = None) -> Mesh | None:
    """The mesh of a cache entry of `store_mesh`. None as in `read_entry`. path: the file that it was read from"""
    arrays: dict[str, Any] | None = read_entry(entry, _check_stored)
    if arrays is None:
        return None
    return Mesh(**arrays | {"polygon_count": int(arrays["polygon_count"][0])}, name=name, path=path)


def store_mesh(entry: Path, mesh: Mesh) -> None:
    """Write a mesh to a cache entry."""
    arrays = {name: getattr(mesh, name) for name in _STORED} | {"polygon_count": np.array([mesh.polygon_count])}
    write_entry(entry, {name: np.ascontiguousarray(x) for name, x in arrays.items() if x is not None})


def read_content(path: Path) -> tuple[str, bytes]:
    """The format of a file, a key of READERS, and its content: decompressed, complete, with the usual line ends.

    Raises MeshError for a file that can't be read, and for content that is not of its format.
    """
    suffix, place = mesh_suffix(path), f"{path}: the file can't be read"
    with raised_as(MeshError, place, OSError):
        if path.is_dir():
            raise MeshError(f"{path}: this is a folder, expected a file")
        if not path.exists():
            raise MeshError(f"{path}: no such file")
        if suffix not in FORMATS:
            raise MeshError(f"{path}: unknown format {suffix!r}, expected one of {', '.join(FORMATS)}, also with .gz")
        if not path.is_file():
            raise MeshError(
                f"{path}: this is a pipe, a socket or a device, expected a file. Copy its content to a file"
            )
        data = path.read_bytes()
        with raised_as(MeshError, place, ValueError):
            if path.suffix.lower() == ".gz":
                data = decompress(data)
            check_content(data, suffix)
            data = with_line_feeds(data, suffix)
            return suffix, embed_buffers(data, path.parent) if suffix == ".gltf" and data.strip() else data


def _parse(data: bytes, suffix: str, name: str) -> Mesh:
    try:
        with raised_as(MeshError, f"{name}: the file can't be read", ValueError):
            verts, sizes, corners, normals = parse(data, suffix)
            faces, polygons = triangulate(verts, sizes, corners)
    except MemoryError as e:
        raise MeshError(f"{name}: its {len(data)} bytes need more memory than there is") from e
    if len(sizes) and not len(faces):
        raise MeshError(f"{name}: none of the {len(sizes)} polygons has three corners")
    if suffix == ".stl":
        firsts, place = np.unique(first_at_position(verts), return_inverse=True)
        verts, faces = verts[firsts], place[faces]
    mesh = make_mesh(verts, faces, name=name, polygons=polygons, polygon_count=len(sizes))
    mesh = replace(mesh, normals=unit_normals(normals))
    if not mesh.has_polygons:
        return mesh
    bad = np.flatnonzero((corners < 0) | (corners >= len(verts)))
    if len(bad):  # in a polygon without triangles
        raise MeshError(f"{name}: a polygon has vertex {corners[bad[0]]}, but indices run from 0 to {len(verts) - 1}")
    return replace(mesh, sizes=sizes, corners=corners)


def _check_stored(arrays: Arrays) -> None:
    """Raises ValueError for arrays of a cache entry that can't be a mesh."""
    verts, faces, count = arrays["verts"], arrays["faces"], arrays["polygon_count"]
    expected = {
        "verts": ("float64", (len(verts), 3)),
        "faces": ("int64", (len(faces), 3)),
        "polygons": ("int64", (len(faces),)),
        "polygon_count": ("int64", (1,)),
    }
    if "normals" in arrays:
        expected["normals"] = ("float64", (len(verts), 3))
    if "sizes" in arrays:
        expected |= {"sizes": ("int64", (int(count[0]),)), "corners": ("int64", (int(arrays["sizes"].sum()),))}
    check_arrays(arrays, expected)
    if len(verts) == 0:
        raise ValueError("it holds no vertices")
    limits = {"faces": len(verts), "polygons": int(count[0]), "corners": len(verts)}
    for what, indices, limit in ((name, arrays[name], limit) for name, limit in limits.items() if name in arrays):
        if indices.size and not (indices.min() >= 0 and indices.max() < limit):
            raise ValueError(f"{what} has indices that are not from 0 to {limit - 1}")
    for what in {"verts", "normals"} & arrays.keys():
        if not np.isfinite(arrays[what]).all():
            raise ValueError(f"{what} has entries that are not finite")
