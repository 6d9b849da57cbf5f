"""Counts that describe a mesh, and its faults."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import potpourri3d

from diffnet.geometry.discretize.coincident import components, joined_vertices
from diffnet.geometry.discretize.original import SHIFT
from diffnet.geometry.mesh.mesh import Mesh
from diffnet.geometry.mesh.normalize import round_positions
from diffnet.geometry.mesh.polygons import first_at_position
from diffnet.geometry.options import JoinRule, Options
from diffnet.geometry.store.cache import Arrays


@dataclass(frozen=True)
class Diagnosis:
    """Counts that describe a mesh. All counts after `area` are 0 for a clean, closed, oriented surface.

    components: connected components, without unreferenced vertices
    joined_components: the components that would be left if vertices at the same position were joined. In a triangle
        soup, every face has its own vertices, so `components` is much larger.
    euler: V − E + F, without unreferenced vertices and degenerate faces
    area: in length²
    boundary_edges: edges with one face
    non_manifold_edges: edges with three or more faces
    misoriented_edges: edges whose two faces run along them in the same direction
    degenerate_faces: faces with a repeated corner
    zero_area_faces: faces with three corners on a line, in double precision
    duplicate_faces: faces with the same three corners as an earlier face
    unreferenced_vertices: vertices that no face uses
    coincident_vertices: vertices at the position of an earlier vertex, in single precision as in `precompute`
    joined_by_default: the coincident vertices that `precompute` joins with an earlier one by default; see
        `joined_vertices`
    inside_out: components whose normals operators turn, see `is_inside_out`
    """

    vertices: int
    faces: int
    edges: int
    components: int
    joined_components: int
    euler: int
    area: float
    boundary_edges: int
    non_manifold_edges: int
    misoriented_edges: int
    degenerate_faces: int
    zero_area_faces: int
    duplicate_faces: int
    unreferenced_vertices: int
    coincident_vertices: int
    joined_by_default: int
    inside_out: int

    @property
    def faults(self) -> list[str]:
        """The faults of the surface with their counts, in words. Boundaries are no fault."""
        named = {
            "edges with three or more faces": self.non_manifold_edges,
            "edges whose faces are oriented against each other": self.misoriented_edges,
            "faces with a repeated corner": self.degenerate_faces,
            "faces of zero area": self.zero_area_faces,
            "duplicate faces": self.duplicate_faces,
            "components that are inside out, whose normals are turned": self.inside_out,
            "vertices that no face uses": self.unreferenced_vertices,
            "vertices at the position of another": self.coincident_vertices,
        }
        if self.joined_components < self.components:
            named[f"components, of {self.components}, that joining these vertices would leave"] = self.joined_components
        return [f"{what}: {count}" for what, count in named.items() if count]


def diagnose(mesh: Mesh) -> Diagnosis:
    """Describe a mesh or a point cloud. For a point cloud, all counts that concern faces are 0.

    >>> from diffnet.geometry import load_mesh
    >>> diagnose(load_mesh(([[0, 0, 0], [1, 0, 0], [0, 1, 0], [5, 5, 5]], [[0, 1, 2]]))).faults
    ['vertices that no face uses: 1']
    """
    faces = mesh.usable_faces
    used = np.unique(faces)
    halves = faces[:, [[0, 1], [1, 2], [2, 0]]].reshape(-1, 2)
    key = halves.min(axis=1) * len(mesh.verts) + halves.max(axis=1)
    keys, edge, count = np.unique(key, return_inverse=True, return_counts=True)
    edges = np.stack(np.divmod(keys, len(mesh.verts)), axis=1)
    forward = np.bincount(edge.reshape(-1), halves[:, 0] < halves[:, 1], len(count))
    area = potpourri3d.face_areas(mesh.verts, faces)
    rounded = round_positions(mesh)
    place = first_at_position(rounded.verts)
    numbers = np.arange(len(place))
    longest = np.ptp(mesh.verts[used] if len(used) else mesh.verts, axis=0).max()
    return Diagnosis(
        vertices=len(mesh.verts),
        faces=len(mesh.faces),
        edges=len(edges),
        components=len(np.unique(components(edges, len(mesh.verts))[used])),
        joined_components=len(np.unique(components(place[edges], len(mesh.verts))[place[used]])),
        euler=len(used) - len(edges) + len(faces),
        area=float(area.sum()),
        boundary_edges=int((count == 1).sum()),
        non_manifold_edges=int((count > 2).sum()),
        misoriented_edges=int(((count == 2) & (forward != 1)).sum()),
        degenerate_faces=len(mesh.faces) - len(faces),
        zero_area_faces=int((area <= 1e-14 * longest**2).sum()),
        duplicate_faces=len(faces) - len(np.unique(np.sort(faces, axis=1), axis=0)),
        unreferenced_vertices=0 if mesh.is_point_cloud else len(mesh.verts) - len(used),
        coincident_vertices=int((place != numbers).sum()),
        joined_by_default=int((joined_vertices(rounded) != numbers).sum()),
        inside_out=_inside_out(rounded),
    )


def is_inside_out(mesh: Mesh, join: JoinRule = "auto") -> bool:
    """Whether operators turn the normals of a component of a mesh, see `Mesh.turned_faces`.

    join: the vertices at the same position that are joined first, see `joined_vertices`

    Normals that are given and the original's operators stay as they are.

    >>> from diffnet.geometry import load_mesh
    >>> corners, faces = [[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]], [[0, 2, 1], [0, 1, 3], [1, 2, 3], [0, 3, 2]]
    >>> is_inside_out(load_mesh((corners, faces))), is_inside_out(load_mesh((corners, [face[::-1] for face in faces])))
    (False, True)
    """
    return _inside_out(round_positions(mesh), join) > 0


def _inside_out(mesh: Mesh, join: JoinRule = "auto") -> int:
    """The number of components that are inside out. mesh: see `round_positions`"""
    joined = replace(mesh, faces=joined_vertices(mesh, join)[mesh.faces])
    turned = joined.faces[joined.turned_faces]
    return len(np.unique(components(joined.faces, len(mesh.verts))[turned[:, 0]]))


def component_warning(mesh: Mesh, arrays: Arrays, options: Options) -> str | None:
    """The warning of `precompute` that all eigenvalues are the zeros of components, if they are.

    arrays: of a cache entry
    """
    k, mass, original = len(arrays["evals"]), arrays["mass"], options.operators == "original"
    live = mass > (10 * SHIFT * mass.mean() if original else 0)  # the original gives mass to vertices without faces
    zero = SHIFT / mass[live].min(initial=np.inf) if original else 0  # and shifts eigenvalues, by no more than this
    if k == 0 or arrays["evals"][-1] > zero:
        return None
    indptr, indices, order = (arrays[name] for name in ("laplacian_indptr", "laplacian_indices", "row_order"))
    rows = np.repeat(order if len(order) else np.arange(len(mass)), np.diff(indptr))
    count = len(np.unique(components(np.stack([rows, indices], axis=1), len(mass))[live]))
    if count < max(k, 2):  # a single eigenpair is always the constant
        return None
    diagnosis = diagnose(mesh)
    hint = ""
    if 0 < diagnosis.joined_components < count:
        hint = (
            f'. With join="always", it would have {diagnosis.joined_components}: then the '
            f"{diagnosis.coincident_vertices} vertices at the position of another would be joined"
        )
    return (
        f"{mesh.name}: every eigenvalue is 0, so diffusion can only average over components. The mesh has {count} "
        f"components, and k is {k}. Use k > {count}, or a mesh with fewer components{hint}"
    )
