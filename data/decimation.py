"""Training on decimated meshes: their labels and own arrays, and predictions back on the full meshes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from diffnet.data.arrays import own_arrays
from diffnet.data.conversion import majority
from diffnet.data.labeled import LabeledMesh, TargetsAt
from diffnet.geometry import ElementsAt, Mesh, closest_points, decimate, element_points, element_weights

# Three elements (N, 3) int64 of a mesh for each of N elements of another one, and their weights (N, 3), with sum 1.
Weights: TypeAlias = "tuple[NDArray[np.int64], NDArray[np.float64]]"


def interpolation_weights(target: Mesh, source: Mesh, at: ElementsAt) -> Weights:
    """The elements of `source` and their weights that give the values at each element of `target`.

    They are those of the point of the source's surface that is nearest to the element, see `element_weights`. Values at
    vertices are linear on each face. Elements are at their centers, see `element_points`.
    """
    return element_weights(source, closest_points(source, element_points(target, at)), at)


def decimated(
    item: LabeledMesh,
    at: TargetsAt,
    max_faces: int | None,
    features: str,
    cache_dir: str | os.PathLike[str] | None = None,
) -> LabeledMesh:
    """A labeled mesh with at most `max_faces` faces, see `decimate`. A mesh with fewer stays as it is.

    Each element of the full mesh votes at the element of the decimated mesh that is nearest to it. The most frequent
    label wins, of equally frequent ones the smallest. An element without votes gets the label of the full mesh at its
    own place. Own arrays among the features are interpolated.

    Raises DataError for an own array that can't be used, MeshError if decimation leaves no face.
    """
    small, arrays = _decimated(item, max_faces, features, cache_dir)
    if small is item.mesh:
        return item
    labels = item.labels if at == "meshes" else transferred_labels(item.labels, item.mesh, small, at)
    return LabeledMesh(item.name, small, labels, arrays)


def decimated_to_score(
    item: LabeledMesh,
    at: TargetsAt,
    max_faces: int | None,
    features: str,
    cache_dir: str | os.PathLike[str] | None = None,
) -> tuple[LabeledMesh, Weights | None]:
    """A decimated mesh with the labels of the full mesh, and the weights that take outputs back to the full mesh.

    A mesh with at most `max_faces` faces stays as it is, and has no weights. For the rest, see `decimated`.
    """
    small, arrays = _decimated(item, max_faces, features, cache_dir)
    if small is item.mesh:
        return item, None
    back = None if at == "meshes" else interpolation_weights(item.mesh, small, at)
    return replace(item, mesh=small, arrays=arrays, prepared=None), back


def _decimated(
    item: LabeledMesh, max_faces: int | None, features: str, cache_dir: str | os.PathLike[str] | None
) -> tuple[Mesh, dict[str, NDArray[np.float64]]]:
    if max_faces is None or len(item.mesh.faces) <= max_faces:
        return item.mesh, {}
    return with_few_faces(item.mesh, own_arrays(item.mesh, features, given=item.arrays), max_faces, cache_dir)


def with_few_faces(
    mesh: Mesh,
    arrays: Mapping[str, NDArray[np.float64]],
    max_faces: int | None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> tuple[Mesh, dict[str, NDArray[np.float64]]]:
    """A mesh with at most `max_faces` faces, see `decimate`, and its own arrays (V, C), interpolated."""
    small = mesh if max_faces is None else decimate(mesh, max_faces, cache_dir)
    if small is mesh or not arrays:
        return small, dict(arrays)
    elements, weights = interpolation_weights(small, mesh, "vertices")
    return small, {name: np.einsum("nk,nkc->nc", weights, array[elements]) for name, array in arrays.items()}


def transferred_labels(labels: NDArray[Any], source: Mesh, target: Mesh, at: ElementsAt) -> NDArray[Any]:
    """Labels (N,) of one mesh at the elements of another mesh of the same surface, see `decimated`.

    Floating-point targets (N,) or (N, C) are interpolated instead. Where one of those that are used is NaN, so is the
    result.
    """
    if labels.dtype.kind == "f":
        elements, weights = interpolation_weights(target, source, at)
        targets: NDArray[Any] = np.einsum("nk,nk...->n...", weights, labels[elements])
        return targets
    elements, weights = element_weights(target, closest_points(target, element_points(source, at)), at)
    votes = np.take_along_axis(elements, weights.argmax(axis=1)[:, None], axis=1)[:, 0]
    points = element_points(target, at)
    winners = majority(labels, np.arange(len(labels)), votes, len(points))
    silent = np.flatnonzero(np.bincount(votes, minlength=len(points)) == 0)
    if len(silent):
        elements, weights = element_weights(source, closest_points(source, points[silent]), at)
        winners[silent] = labels[np.take_along_axis(elements, weights.argmax(axis=1)[:, None], axis=1)[:, 0]]
    return winners
