"""Hashes of meshes, by which `diffnet evaluate` knows the meshes that a network was trained on."""

from __future__ import annotations

import hashlib

from diffnet.geometry import Mesh


def mesh_hash(mesh: Mesh) -> str:
    """A hash of the positions and the faces of a mesh: 16 hexadecimal digits. Checkpoints store it.

    >>> from diffnet.geometry import make_mesh
    >>> corners, faces = [[0, 0, 0], [1, 0, 0], [0, 1, 0]], [[0, 1, 2]]
    >>> mesh_hash(make_mesh(corners, faces, name="a")) == mesh_hash(make_mesh(corners, faces, name="b"))
    True
    """
    digest = hashlib.sha256()
    for array in (mesh.verts, mesh.faces):
        digest.update(f"{array.shape}".encode() + array.tobytes())
    return digest.hexdigest()[:16]
