"""Meshes of one surface as different programs make them, by the filters of `pymeshlab`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from trimesh import Trimesh

from diffnet.geometry.discretize.coincident import components

LENGTHS = ("targetlen", "maxsurfdist", "cellsize", "offset", "threshold")
REPAIR: tuple[tuple[str, dict[str, Any]], ...] = (
    ("meshing_repair_non_manifold_edges", {}),
    ("meshing_repair_non_manifold_vertices", {"vertdispratio": 0.0}),
    ("meshing_remove_connected_component_by_face_number", {"mincomponentsize": 60}),
    ("meshing_close_holes", {"maxholesize": 40, "selfintersection": False}),
    ("meshing_remove_unreferenced_vertices", {}),
)
MESHERS = ("collapsed", "isotropic", "scanned", "voxels", "poisson")


def surface(verts: NDArray[np.float64], faces: NDArray[np.int64]) -> Trimesh:
    """A mesh whose vertices and faces stay as they are."""
    return Trimesh(verts, faces, process=False)


def filtered(mesh: Trimesh, *steps: tuple[str, dict[str, Any]]) -> Trimesh:
    """Filters of `pymeshlab`, one after the other. A step is a name and its options, with lengths in meters."""
    import pymeshlab

    meshes = _meshes(mesh)
    for name, options in steps:
        getattr(meshes, name)(**{k: pymeshlab.PureValue(x) if k in LENGTHS else x for k, x in options.items()})
    return _result(meshes)


def cut_share(mesh: Trimesh) -> float:
    """The share of faces that cut others."""
    meshes = _meshes(mesh)
    meshes.compute_selection_by_self_intersections_per_face()
    return float(meshes.current_mesh().selected_face_number() / len(mesh.faces))


def collapsed(mesh: Trimesh, count: int) -> Trimesh:
    """About so many vertices by edge collapse."""
    options = {"targetfacenum": 2 * count - 4, "preservetopology": True, "preservenormal": True}
    return filtered(mesh, ("meshing_decimation_quadric_edge_collapse", {**options, "optimalplacement": True}))


def isotropic(mesh: Trimesh, count: int) -> Trimesh:
    """About so many vertices and edges of one length. A second round corrects the length."""
    start, length = collapsed(mesh, min(5 * count, len(mesh.vertices))), np.sqrt(mesh.area / (0.866 * count))
    result = start
    for iterations in (3, 6):
        options = {"iterations": iterations, "targetlen": length, "maxsurfdist": length / 3, "featuredeg": 80}
        result = filtered(start, ("meshing_isotropic_explicit_remeshing", options), *REPAIR)
        length *= np.sqrt(len(result.vertices) / count)
    return result


def scanned(mesh: Trimesh, count: int, rng: np.random.Generator) -> Trimesh:
    """With the noise of a scanner, smoothed and collapsed."""
    fine = collapsed(mesh, min(max(8 * count, 4000), len(mesh.vertices)))
    noise = rng.normal(0, rng.uniform(0.001, 0.004), len(fine.vertices))
    rough = surface(fine.vertices + fine.vertex_normals * noise[:, None], fine.faces)
    return collapsed(filtered(rough, ("apply_coord_taubin_smoothing", {"stepsmoothnum": 5})), count)


def voxels(mesh: Trimesh, count: int, rng: np.random.Generator) -> Trimesh:
    """Marching cubes outside of the surface: fingers, armpits and close limbs grow together."""
    cell = np.sqrt(mesh.area) * rng.uniform(0.012, 0.026)
    options = {"cellsize": cell, "offset": 0.4 * cell, "mergeclosevert": True}
    smooth = ("apply_coord_laplacian_smoothing", {"stepsmoothnum": 2})
    return collapsed(filtered(mesh, ("generate_resampled_uniform_mesh", options), smooth, *REPAIR), count)


def poisson(mesh: Trimesh, count: int, rng: np.random.Generator) -> Trimesh:
    """Poisson reconstruction from random points, with up to three holes."""
    faces = rng.choice(len(mesh.faces), 15000, p=mesh.area_faces / mesh.area)
    corners = rng.dirichlet((1, 1, 1), len(faces))
    points = np.einsum("ni,nij->nj", corners, mesh.triangles[faces]) + rng.normal(0, 0.001, (15000, 3))
    meshes = _meshes(surface(points, np.empty((0, 3), np.int64)), mesh.face_normals[faces])
    meshes.generate_surface_reconstruction_screened_poisson(depth=7, threads=1)
    result = collapsed(filtered(_result(meshes), *REPAIR), count)
    for _ in range(rng.integers(0, 4)):
        spot = result.vertices[rng.integers(len(result.vertices))]
        far = np.linalg.norm(result.triangles_center - spot, axis=1) > rng.uniform(0.02, 0.045)
        result = surface(result.vertices, result.faces[far])
    return result


def remeshed(mesh: Trimesh, mesher: str, count: int, rng: np.random.Generator) -> Trimesh:
    """The largest component of a mesh of about so many vertices, which are in random order.

    mesher: one of MESHERS
    """
    if mesher in ("collapsed", "isotropic"):
        result = collapsed(mesh, count) if mesher == "collapsed" else isotropic(mesh, count)
    else:
        result = {"scanned": scanned, "voxels": voxels, "poisson": poisson}[mesher](mesh, count, rng)
    return shuffled(largest_component(result), rng)


def largest_component(mesh: Trimesh) -> Trimesh:
    component = components(mesh.faces, len(mesh.vertices))[mesh.faces[:, 0]]
    used, faces = np.unique(mesh.faces[component == np.bincount(component).argmax()], return_inverse=True)
    return surface(mesh.vertices[used], faces.reshape(-1, 3))


def shuffled(mesh: Trimesh, rng: np.random.Generator) -> Trimesh:
    """The same with vertices and faces in random order."""
    order = rng.permutation(len(mesh.vertices))
    faces = np.argsort(order)[mesh.faces]
    return surface(mesh.vertices[order], faces[rng.permutation(len(faces))])


def _meshes(mesh: Trimesh, normals: NDArray[np.float64] | None = None) -> Any:
    """Where the filters work. Their results depend on the normals of the vertices."""
    import pymeshlab

    normals = mesh.vertex_normals if normals is None else normals
    meshes = pymeshlab.MeshSet(verbose=False)
    meshes.add_mesh(pymeshlab.Mesh(np.asarray(mesh.vertices), np.asarray(mesh.faces), v_normals_matrix=normals))
    return meshes


def _result(meshes: Any) -> Trimesh:
    return surface(meshes.current_mesh().vertex_matrix(), meshes.current_mesh().face_matrix())
