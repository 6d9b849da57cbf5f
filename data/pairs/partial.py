"""Partial shapes, which have no correspondence with whole ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diffnet.geometry import Mesh, MeshError
from diffnet.geometry.discretize.coincident import first_at_position, open_edges
from diffnet.geometry.elements.elements import face_areas

# A shape is partial if its boundary is longer than that of the other one by more than this part of √area. The
# circumference of a leg is about 0.4.
MAX_DIFFERENCE = 0.25


def check_whole(pairs: Sequence[tuple[Mesh, Mesh]]) -> None:
    """Raises MeshError if one of the two meshes of a pair is a part of a shape and the other one a whole.

    Both may have a boundary, as scans of faces have. A shape counts as partial if its boundary is longer than that of
    the other one by more than MAX_DIFFERENCE √area. Point clouds have no boundary.
    """
    meshes = {id(mesh): mesh for pair in pairs for mesh in pair}
    lengths = {key: boundary_length(mesh) for key, mesh in meshes.items()}
    for pair in pairs:
        whole, part = sorted(pair, key=lambda mesh: lengths[id(mesh)])
        shorter, longer = lengths[id(whole)], lengths[id(part)]
        if longer - shorter > MAX_DIFFERENCE:
            raise MeshError(
                f"{part.name}: partial shapes are not supported; its boundary is {longer:.2f} √area long, that of "
                f"{whole.name} {shorter:.2f} √area"
            )


def boundary_length(mesh: Mesh) -> float:
    """The length of all edges that belong to one face only, divided by √area. Vertices at one position are joined."""
    faces = first_at_position(mesh.verts)[mesh.faces]
    start, end = mesh.verts[open_edges(faces, len(mesh.verts))].transpose(1, 0, 2)
    length, area = float(np.linalg.norm(end - start, axis=1).sum()), float(face_areas(mesh).sum())
    return length / np.sqrt(area) if area > 0 else 0.0
