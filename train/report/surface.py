"""Labeled surfaces as checked arrays, and the normals and elements of their corners."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from diffnet.data.labeled import LabelsAt
from diffnet.geometry import mesh_edges

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]


def check_labeled(verts: Any, faces: Any, labels: Any, at: LabelsAt) -> tuple[Floats, Ints, Ints]:
    """The arguments as arrays (V, 3) float64, (F, 3) int64 and (N,) int64. Raises ValueError if they do not fit."""
    verts = np.asarray(verts, np.float64)
    if verts.ndim != 2 or verts.shape[1] != 3:
        raise ValueError(f"vertices should have shape (V, 3), shape is {verts.shape}")
    faces = np.zeros((0, 3), np.int64) if faces is None or len(faces) == 0 else np.asarray(faces, np.int64)
    if faces.ndim != 2 or faces.shape[1] != 3:
        raise ValueError(f"faces should have shape (F, 3), shape is {faces.shape}")
    if len(faces) and not (faces.min() >= 0 and faces.max() < len(verts)):
        raise ValueError(f"faces should index {len(verts)} vertices, but run from {faces.min()} to {faces.max()}")
    if at == "vertices":
        count = len(verts)
    elif at == "faces":
        count = len(faces)
    elif at == "edges":
        count = len(mesh_edges(faces))
    else:
        raise ValueError(f"at should be vertices, faces or edges, got {at!r}")
    if not len(faces) and at != "vertices":
        raise ValueError(f"a point cloud has no {at} to label")
    labels = np.asarray(labels)
    if labels.shape != (count,):
        raise ValueError(f"labels at {at} should have shape ({count},), shape is {labels.shape}")
    if not (np.issubdtype(labels.dtype, np.integer) or labels.dtype == bool):
        raise ValueError(f"labels should be integers, dtype is {labels.dtype}")
    return verts, faces, labels.astype(np.int64)


def shown_points(verts: Floats, faces: Ints) -> Floats:
    """The points (N, 3) that a picture must show: the finite ones. On a mesh, only those that a face uses."""
    if len(faces):
        verts = verts[np.unique(faces)]
    return verts[np.isfinite(verts).all(axis=1)]


def face_elements(faces: Ints, at: LabelsAt) -> Ints:
    """For every face, the three elements (F, 3) int64 that color it.

    These are its corners for labels at vertices, and the face itself for labels at faces. For labels at edges they are
    its sides, where side k is opposite corner k.
    """
    if at == "vertices":
        return faces
    if at == "faces":
        return np.repeat(np.arange(len(faces))[:, None], 3, axis=1)
    edges = mesh_edges(faces)
    stride = int(faces.max(initial=0)) + 1
    keys = edges[:, 0] * stride + edges[:, 1]
    order = np.argsort(keys)
    sides = np.sort(faces[:, [[1, 2], [2, 0], [0, 1]]], axis=-1)
    found: Ints = order[np.searchsorted(keys, sides[..., 0] * stride + sides[..., 1], sorter=order)]
    return found


def corner_normals(verts: Floats, faces: Ints) -> Floats:
    """A unit normal (F, 3, 3) for every corner of every face.

    The normal is the mean over the faces at the vertex, weighted by their angles. A face far from this mean keeps its
    own normal: at a sharp edge, or if its neighbors have the opposite orientation. Faces without area have normal 0.
    """
    corners = verts[faces]
    along = unit(np.roll(corners, -1, axis=1) - corners)
    angles = np.arccos((along * -np.roll(along, 1, axis=1)).sum(-1).clip(-1, 1))
    own = unit(np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]))[:, None]
    weighted = (own * angles[..., None]).reshape(-1, 3)
    mean = np.zeros_like(verts)
    for i in range(3):
        mean[:, i] = np.bincount(faces.ravel(), weighted[:, i], len(verts))
    smooth = unit(mean)[faces]
    return np.where((smooth * own).sum(-1, keepdims=True) > 0.6, smooth, own)


def unit(vectors: Floats) -> Floats:
    """Vectors (..., 3) at length 1. Zero vectors stay zero."""
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    scaled: Floats = np.divide(vectors, length, out=np.zeros_like(vectors), where=length > 0)
    return scaled
