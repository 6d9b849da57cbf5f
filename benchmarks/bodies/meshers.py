"""Meshes of one surface as different programs make them, by the filters of `pymeshlab`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy import sparse

LENGTHS = ("targetlen", "maxsurfdist", "cellsize", "offset", "threshold")
REPAIR: tuple[tuple[str, dict[str, Any]], ...] = (
    ("meshing_repair_non_manifold_edges", {}),
    ("meshing_repair_non_manifold_vertices", {"vertdispratio": 0.0}),
    ("meshing_remove_connected_component_by_face_number", {"mincomponentsize": 60}),
    ("meshing_close_holes", {"maxholesize": 40, "selfintersection": False}),
    ("meshing_remove_unreferenced_vertices", {}),
)
MESHERS = ("collapsed", "isotropic", "scanned", "voxels", "poisson")


class Surface(NamedTuple):
    """verts: (V, 3) in meters; faces: (F, 3)"""

    verts: np.ndarray
    faces: np.ndarray

    def face_vectors(self) -> np.ndarray:
        """The normals (F, 3) of the faces, as long as twice their areas."""
        a, b, c = (self.verts[self.faces[:, i]] for i in range(3))
        return np.cross(b - a, c - a)

    def area(self) -> float:
        return float(np.linalg.norm(self.face_vectors(), axis=1).sum() / 2)

    def centers(self) -> np.ndarray:
        """The centers (F, 3) of the faces."""
        return self.verts[self.faces].mean(1)

    def face_normals(self) -> np.ndarray:
        return _normalized(self.face_vectors())

    def vertex_normals(self) -> np.ndarray:
        sums = np.zeros_like(self.verts)
        for corner in self.faces.T:
            np.add.at(sums, corner, self.face_vectors())
        return _normalized(sums)


def filtered(surface: Surface, *steps: tuple[str, dict[str, Any]]) -> Surface:
    """Filters of `pymeshlab`, one after the other. A step is a name and its options, with lengths in meters."""
    import pymeshlab

    meshes = _meshes(surface)
    for name, options in steps:
        getattr(meshes, name)(**{k: pymeshlab.PureValue(x) if k in LENGTHS else x for k, x in options.items()})
    return _result(meshes)


def cut_share(surface: Surface) -> float:
    """The share of faces that cut others."""
    meshes = _meshes(surface)
    meshes.compute_selection_by_self_intersections_per_face()
    return float(meshes.current_mesh().selected_face_number() / len(surface.faces))


def collapsed(surface: Surface, count: int) -> Surface:
    """About so many vertices by edge collapse."""
    options = {"targetfacenum": 2 * count - 4, "preservetopology": True, "preservenormal": True}
    return filtered(surface, ("meshing_decimation_quadric_edge_collapse", {**options, "optimalplacement": True}))


def isotropic(surface: Surface, count: int) -> Surface:
    """About so many vertices and edges of one length. A second round corrects the length."""
    start, length = collapsed(surface, min(5 * count, len(surface.verts))), np.sqrt(surface.area() / (0.866 * count))
    result = start
    for iterations in (3, 6):
        options = {"iterations": iterations, "targetlen": length, "maxsurfdist": length / 3, "featuredeg": 80}
        result = filtered(start, ("meshing_isotropic_explicit_remeshing", options), *REPAIR)
        length *= np.sqrt(len(result.verts) / count)
    return result


def scanned(surface: Surface, count: int, rng: np.random.Generator) -> Surface:
    """With the noise of a scanner, smoothed and collapsed."""
    fine = collapsed(surface, min(max(8 * count, 4000), len(surface.verts)))
    noise = rng.normal(0, rng.uniform(0.001, 0.004), len(fine.verts))
    rough = fine._replace(verts=fine.verts + fine.vertex_normals() * noise[:, None])
    return collapsed(filtered(rough, ("apply_coord_taubin_smoothing", {"stepsmoothnum": 5})), count)


def voxels(surface: Surface, count: int, rng: np.random.Generator) -> Surface:
    """Marching cubes outside of the surface: fingers, armpits and close limbs grow together."""
    cell = np.sqrt(surface.area()) * rng.uniform(0.012, 0.026)
    options = {"cellsize": cell, "offset": 0.4 * cell, "mergeclosevert": True}
    smooth = ("apply_coord_laplacian_smoothing", {"stepsmoothnum": 2})
    return collapsed(filtered(surface, ("generate_resampled_uniform_mesh", options), smooth, *REPAIR), count)


def poisson(surface: Surface, count: int, rng: np.random.Generator) -> Surface:
    """Poisson reconstruction from random points, with up to three holes."""
    areas = np.linalg.norm(surface.face_vectors(), axis=1)
    faces = rng.choice(len(areas), 15000, p=areas / areas.sum())
    corners = rng.dirichlet((1, 1, 1), len(faces))
    points = np.einsum("ni,nij->nj", corners, surface.verts[surface.faces[faces]]) + rng.normal(0, 0.001, (15000, 3))
    meshes = _meshes(Surface(points, np.empty((0, 3), np.int64)), surface.face_normals()[faces])
    meshes.generate_surface_reconstruction_screened_poisson(depth=7, threads=1)
    result = collapsed(filtered(_result(meshes), *REPAIR), count)
    for _ in range(rng.integers(0, 4)):
        spot = result.verts[rng.integers(len(result.verts))]
        far = np.linalg.norm(result.centers() - spot, axis=1) > rng.uniform(0.02, 0.045)
        result = result._replace(faces=result.faces[far])
    return result


def remeshed(surface: Surface, mesher: str, count: int, rng: np.random.Generator) -> Surface:
    """The largest component of a mesh of about so many vertices, which are in random order.

    mesher: one of MESHERS
    """
    if mesher in ("collapsed", "isotropic"):
        result = collapsed(surface, count) if mesher == "collapsed" else isotropic(surface, count)
    else:
        result = {"scanned": scanned, "voxels": voxels, "poisson": poisson}[mesher](surface, count, rng)
    return shuffled(largest_component(result), rng)


def largest_component(surface: Surface) -> Surface:
    verts, faces = surface
    edges = faces[:, [0, 1, 1, 2]].reshape(-1, 2)
    graph = sparse.coo_matrix((np.ones(len(edges)), edges.T), (len(verts),) * 2)
    component = sparse.csgraph.connected_components(graph, directed=False)[1][faces[:, 0]]
    used, faces = np.unique(faces[component == np.bincount(component).argmax()], return_inverse=True)
    return Surface(verts[used], faces.reshape(-1, 3))


def shuffled(surface: Surface, rng: np.random.Generator) -> Surface:
    """The same with vertices and faces in random order."""
    order = rng.permutation(len(surface.verts))
    faces = np.argsort(order)[surface.faces]
    return Surface(surface.verts[order], faces[rng.permutation(len(faces))])


def _meshes(surface: Surface, normals: np.ndarray | None = None) -> Any:
    """Where the filters work. Their results depend on the normals of the vertices."""
    import pymeshlab

    normals = surface.vertex_normals() if normals is None else normals
    meshes = pymeshlab.MeshSet(verbose=False)
    meshes.add_mesh(pymeshlab.Mesh(surface.verts, surface.faces, v_normals_matrix=normals))
    return meshes


def _result(meshes: Any) -> Surface:
    mesh = meshes.current_mesh()
    return Surface(mesh.vertex_matrix(), mesh.face_matrix())


def _normalized(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-30)
