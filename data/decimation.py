"""Training on decimated meshes: their labels and own arrays, and predictions back on the full meshes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffnet.data.arrays import own_arrays
from diffnet.data.conversion import majority
from diffnet.data.labeled import LabeledMesh, TargetsAt
from diffnet.geometry import (
    ElementsAt,
    Mesh,
    decimate,
    element_points,
    element_weights,
    nearest_on_surface,
)


@dataclass(frozen=True)
class Interpolation:
    """Values at the elements of a mesh from values at those of another mesh of the same surface.

    elements: (N, 3) int64, three elements of the other mesh for each of the N elements
    weights: (N, 3) float32, their weights, with sum 1
    """

    elements: Tensor
    weights: Tensor

    def __call__(self, values: Tensor) -> Tensor:
        """values (M, C) of the other mesh → (N, C)"""
        taken = values[self.elements] * self.weights.to(values.dtype)[..., None]
        return taken.sum(1)

    def to(self, device: torch.device | str) -> Interpolation:
        return Interpolation(self.elements.to(device), self.weights.to(device))


def interpolation(target: Mesh, source: Mesh, at: ElementsAt) -> Interpolation:
    """Values at `source` to those at `target`, from the point of the source's surface that is nearest to each element.

    Values at vertices are linear on each face. Elements are at their centers, see `element_points`.
    """
    elements, weights = element_weights(source, nearest_on_surface(source, element_points(target, at)), at)
    return Interpolation(torch.from_numpy(elements), torch.from_numpy(weights).float())


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
    if max_faces is None or len(item.mesh.faces) <= max_faces:
        return item
    arrays = own_arrays(item.mesh, features, given=item.arrays)
    small, arrays = with_few_faces(item.mesh, arrays, max_faces, cache_dir)
    labels = item.labels if at == "meshes" else transferred_labels(item.labels, item.mesh, small, at)
    return LabeledMesh(item.name, small, labels, arrays)


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
    to_small = interpolation(small, mesh, "vertices")
    return small, {name: to_small(torch.from_numpy(array)).numpy() for name, array in arrays.items()}


def transferred_labels(labels: NDArray[np.int64], source: Mesh, target: Mesh, at: ElementsAt) -> NDArray[np.int64]:
    """Labels of one mesh at the elements of another mesh of the same surface, see `decimated`."""
    elements, weights = element_weights(target, nearest_on_surface(target, element_points(source, at)), at)
    votes = np.take_along_axis(elements, weights.argmax(axis=1)[:, None], axis=1)[:, 0]
    points = element_points(target, at)
    found = majority(labels, np.arange(len(labels)), votes, len(points))
    silent = np.flatnonzero(np.bincount(votes, minlength=len(points)) == 0)
    if len(silent):
        elements, weights = element_weights(source, nearest_on_surface(source, points[silent]), at)
        found[silent] = labels[np.take_along_axis(elements, weights.argmax(axis=1)[:, None], axis=1)[:, 0]]
    return found
