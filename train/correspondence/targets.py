"""Samples of pairs, with their true functional maps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffnet.cuda_graphs.sizes import BatchSize, MeshSizes, largest_batch, sizes_of
from diffnet.data import DataError, MeshPairs, PairSample, PairShape, Sample
from diffnet.data.pairs.shapes import Pair
from diffnet.ops import functional_map_from_correspondences
from diffnet.train.correspondence.partial import overlap_targets
from diffnet.train.resident import DeviceSamples, ReadAhead, counts_of

MAX_KEPT = 256  # meshes whose eigenfunctions at template points are kept, each of 4 MB for 5,000 points


def pair_samples(
    data: MeshPairs, part: str, samples: Sequence[Sample], map_k: int | None, *, with_targets: bool = True
) -> PairSamples:
    """The pairs of the training or test part of a set as samples.

    part: "train" or "test"
    samples: the preprocessed meshes of this part, which are read when a pair needs them
    map_k: K, the eigenpairs of the true functional maps. None for partial shapes, see `overlap_targets`.
    with_targets: if False, these maps are not known

    Raises DataError for a mesh with fewer than K vertices.
    """
    shapes, pairs = (data.train, data.train_pairs) if part == "train" else (data.test, data.test_pairs)
    if map_k is None:
        return PairSamples(samples, pairs, partial(overlap_targets, data, shapes))
    for shape, vertices in zip(shapes, counts_of(samples), strict=True):
        if vertices < map_k:
            raise DataError(
                f"{shape.name}: {vertices} vertices are too few for maps of {map_k} eigenpairs; lower --map-k"
            )
    return PairSamples(samples, pairs, _Truths(data if with_targets else None, shapes, map_k))


@dataclass(frozen=True, eq=False)
class PairSamples(ReadAhead[PairSample]):
    """Pairs of samples, see `pair_samples`.

    meshes: on the device of the network, or where `packed` moves them from
    pairs: the numbers of two meshes
    """

    meshes: Sequence[Sample]
    pairs: Sequence[Pair]
    truths: Callable[[Pair, Sample, Sample], Tensor]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return replace(self, pairs=self.pairs[key])
        i, j = self.pairs[key]
        first, second = self.meshes[i], self.meshes[j]
        return PairSample(second, first, partial(self.truths, (i, j), first, second))

    def take(self, numbers: Sequence[int]) -> PairSamples:
        return replace(self, pairs=[self.pairs[n] for n in numbers])

    @property
    def vertex_counts(self) -> NDArray[np.int64]:
        """Of both meshes together."""
        counts = np.asarray(counts_of(self.meshes), np.int64)
        return counts[np.array(self.pairs, np.int64).reshape(-1, 2)].sum(1)

    def sizes(self) -> MeshSizes:
        meshes = self.meshes
        each = meshes.sizes() if isinstance(meshes, ReadAhead) else sizes_of([mesh.operators for mesh in meshes])

        def counted(names: Iterable[str]) -> list[BatchSize]:
            of_mesh = each.counted(names)
            return [largest_batch([of_mesh[i], of_mesh[j]], None, None) for i, j in self.pairs]

        return MeshSizes(counted, each.k)

    @property
    def source(self) -> DeviceSamples | None:
        return self.meshes if isinstance(self.meshes, DeviceSamples) else None

    def in_source(self, numbers: Sequence[int]) -> Sequence[int]:
        return [mesh for n in numbers for mesh in self.pairs[n]]


def unknown_map(k: int, device: torch.device | None = None) -> Tensor:
    """The target (1, K, K) of a pair whose correspondences are not known."""
    return torch.full((1, k, k), torch.nan, device=device)


class _Truths:
    """True functional maps by least squares, from the correspondences of a set. Without a set, they are not known."""

    def __init__(self, data: MeshPairs | None, shapes: Sequence[PairShape], k: int) -> None:
        self._data, self._shapes, self._k = data, shapes, k
        self._values: dict[int, Tensor] = {}
        self._inverses: dict[int, Tensor] = {}

    def __call__(self, pair: Pair, one: Sample, other: Sample) -> Tensor:
        """The map (1, K, K) from functions on the second mesh to functions on the first, on the device of the samples.

        Φ_first C ≈ Φ_second at the points that correspond. If each mesh has all points of a template, its
        eigenfunctions there and their pseudo-inverse are kept.

        one, other: the samples of the first mesh and of the second one
        """
        i, j = pair
        first, second = self._shapes[i], self._shapes[j]
        if self._data is not None and self._data.share_template(first, second):
            c = self._inverse_at_template(i, one) @ self._at_template(j, other)
        else:
            truth = None if self._data is None else self._data.truth(first, second)
            if truth is None:
                return unknown_map(self._k, one.features.device)
            evecs = self._evecs(one)
            points, vertices = (torch.from_numpy(x).to(evecs.device) for x in (truth.points, truth.vertices))
            c = functional_map_from_correspondences(points, vertices, self._evecs(other), evecs)
        return c.float()[None]

    def _evecs(self, sample: Sample) -> Tensor:
        return sample.operators.evecs[:, : self._k].float()

    def _at_template(self, number: int, sample: Sample) -> Tensor:
        """The eigenfunctions of a mesh at the points of the template (T, K)."""
        if number not in self._values:
            evecs = self._evecs(sample)
            _keep(self._values, number, evecs[torch.as_tensor(self._shapes[number].template, device=evecs.device)])
        return self._values[number]

    def _inverse_at_template(self, number: int, sample: Sample) -> Tensor:
        """The pseudoinverse (K, T) of these values."""
        if number not in self._inverses:
            q, r = torch.linalg.qr(self._at_template(number, sample).double())
            _keep(self._inverses, number, (torch.linalg.pinv(r) @ q.mT).float())
        return self._inverses[number]


def _keep(values: dict[int, Tensor], number: int, value: Tensor) -> None:
    """Keep a value, and drop the oldest one if there are too many."""
    if len(values) >= MAX_KEPT:
        del values[next(iter(values))]
    values[number] = value
