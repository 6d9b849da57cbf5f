"""Geodesic errors of predicted correspondences, and of their left-right flips."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diffnet.data.labeled import DataError
from diffnet.data.pairs.shapes import Ints, MeshPairs, PairShape, Truth
from diffnet.geometry import Mesh, Prediction, geodesic_errors_of_all, mean_error
from diffnet.geometry.elements.elements import face_areas
from diffnet.geometry.mesh.objects import on_host

Floats = NDArray[np.float64]

FLIP_SAMPLE = 100  # correspondences that decide whether a map exchanges left and right


@dataclass(frozen=True)
class PairErrors:
    """The errors of one predicted map, see `geodesic_errors`.

    errors: (N,) float64, of all true correspondences of the pair
    flipped: whether the map is closer to the mirrored truth, where left and right are exchanged
    unflipped: (N,) the errors to the closer of the two truths; `errors` if the map is not flipped
    """

    errors: Floats
    flipped: bool
    unflipped: Floats


def pair_errors(
    data: MeshPairs,
    pairs: Sequence[tuple[PairShape, PairShape]],
    predicted: Sequence[ArrayLike],
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
) -> list[PairErrors]:
    """Measure predicted maps of pairs of meshes.

    pairs: the meshes (first, second) of each pair
    predicted: (V,) integers for each pair: for each vertex of the first mesh, a vertex of the second, or −1 for none,
        whose errors are NaN
    cache_dir, jobs: see `geodesic_errors_of_all`

    Errors of partial shapes are those in the overlap. They are divided by √area of the larger mesh, and are straight
    distances between pieces without a path.

    Raises ValueError for a pair without truth, and for a map with another number of vertices than the first mesh;
    DataError for a map without a vertex where there is a true one.
    """
    maps = [_map(first, vertices) for (first, _), vertices in zip(pairs, predicted, strict=True)]
    meshes = [second.mesh for _, second in pairs]
    truths = [_truth_of(data, first, second) for first, second in pairs]
    for (first, _), vertices, points in zip(pairs, maps, truths, strict=True):
        if len(points.vertices) and not (vertices[points.vertices] >= 0).any():
            raise DataError(f"{first.name}: a predicted map has no vertex where there is a true one")
    mirrors = {i: truth for i, pair in enumerate(pairs) if (truth := data.mirrored_truth(*pair)) is not None}

    measure = partial(_errors, cache_dir=cache_dir, jobs=jobs)
    distances = measure(
        [
            Prediction(mesh, vertices[t.vertices], t.points)
            for mesh, vertices, t in zip(meshes, maps, truths, strict=True)
        ]
        # A sample decides whether a map is flipped. Distances to the wrong truth are long, and long ones take longest.
        + [_sample_of(meshes[i], maps[i][t.vertices], t.points) for i, t in mirrors.items()]
    )
    errors, samples = distances[: len(pairs)], distances[len(pairs) :]
    for i, (first, second) in enumerate(pairs):
        if data.is_partial(first, second):
            errors[i] = _errors_of_part(first, second, (maps[i][truths[i].vertices], truths[i].points), errors[i])
    flips = [
        i
        for i, sample in zip(mirrors, samples, strict=True)
        if mean_error(sample) < mean_error(errors[i][_sample(maps[i][mirrors[i].vertices])])
    ]
    others = measure([Prediction(meshes[i], maps[i][mirrors[i].vertices], mirrors[i].points) for i in flips])
    by_mirror = dict(zip(flips, others, strict=True))
    return [PairErrors(each, i in by_mirror, by_mirror.get(i, each)) for i, each in enumerate(errors)]


def _errors_of_part(first: PairShape, second: PairShape, ends: tuple[Ints, Ints], errors: Floats) -> Floats:
    """The errors (N,) divided by √area of the larger mesh, with straight distances where no path leads.

    ends: the predicted and the true vertices (N,) of the second mesh
    """
    areas = [face_areas(shape.mesh).sum() for shape in (first, second)]
    predicted, true = (second.mesh.verts[vertices] for vertices in ends)
    straight = np.linalg.norm(predicted - true, axis=1) / np.sqrt(areas[1])
    return np.where(np.isinf(errors), straight, errors) * np.sqrt(areas[1] / max(areas))


def _errors(predictions: Sequence[Prediction], **how: Any) -> list[Floats]:
    """See `geodesic_errors_of_all`. A negative prediction is none, and its error is NaN."""
    present = [each._replace(predicted=np.maximum(each.predicted, 0)) for each in predictions]
    return [
        np.where(each.predicted < 0, np.nan, errors)
        for each, errors in zip(predictions, geodesic_errors_of_all(present, **how), strict=True)
    ]


def _map(first: PairShape, vertices: ArrayLike) -> Ints:
    array = np.asarray(on_host(vertices))
    if array.shape != (len(first.mesh.verts),) or array.dtype.kind not in "iu":
        raise ValueError(
            f"{first.name}: a predicted map should be integers of shape ({len(first.mesh.verts)},), one for each "
            f"vertex, got {array.dtype} of shape {array.shape}"
        )
    return array.astype(np.int64)


def _truth_of(data: MeshPairs, first: PairShape, second: PairShape) -> Truth:
    truth = data.truth(first, second)
    if truth is None:
        raise ValueError(f"the true correspondences of {first.name} and {second.name} are not known")
    return truth


def _sample(predicted: Ints) -> Ints:
    """Some places of predictions that are there."""
    places = np.flatnonzero(predicted >= 0)
    return places[np.unique(np.linspace(0, len(places) - 1, min(len(places), FLIP_SAMPLE)).astype(np.int64))]


def _sample_of(mesh: Mesh, vertices: Ints, labels: Ints) -> Prediction:
    numbers = _sample(vertices)
    return Prediction(mesh, vertices[numbers], labels[numbers])
