"""Hashes of meshes, by which `diffnet evaluate` knows the meshes that a network was trained on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diffnet.data import LabeledMesh
from diffnet.data.stored import StoredMeshes, content_hash, remembered
from diffnet.geometry import Mesh

DIGITS = 16  # of a `mesh_hash`


def mesh_hash(mesh: Mesh) -> str:
    """A hash of the positions and the faces of a mesh: 16 hexadecimal digits. Checkpoints store it.

    >>> from diffnet.geometry import make_mesh
    >>> corners, faces = [[0, 0, 0], [1, 0, 0], [0, 1, 0]], [[0, 1, 2]]
    >>> mesh_hash(make_mesh(corners, faces, name="a")) == mesh_hash(make_mesh(corners, faces, name="b"))
    True
    """
    return content_hash(mesh.verts, mesh.faces)[:DIGITS]


def contents_of(items: Sequence[LabeledMesh], jobs: int | None = None) -> list[list[str]]:
    """For each mesh, a hash of which its `mesh_hash` is the beginning, and hashes of its labels.

    They are known of indexed sets. Others are read, see `remembered`.
    """
    known = items.contents if isinstance(items, StoredMeshes) else None
    return remembered(_content_of, items, "content", jobs=jobs) if known is None else known


def _content_of(item: LabeledMesh) -> list[str]:
    return [content_hash(item.mesh.verts, item.mesh.faces), content_hash(np.asarray(item.labels))]
