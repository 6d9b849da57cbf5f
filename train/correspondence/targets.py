"""Samples of pairs, with their true functional maps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from diffnet.data import DataError, MeshPairs, PairSample, PairShape, Sample
from diffnet.data.pairs.shapes import Pair
from diffnet.geometry import Operators, SurfacePoints
from diffnet.ops import functional_map_from_correspondences


def pair_samples(
    data: MeshPairs, part: str, samples: Sequence[Sample], map_k: int, *, with_targets: bool = True
) -> list[PairSample]:
    """The pairs of the training or test part of a set as samples.

    part: "train" or "test"
    samples: the preprocessed meshes of this part
    map_k: K, the eigenpairs of the true functional maps
    with_targets: if False, the targets are NaN

    Raises DataError for a mesh with fewer than K vertices.
    """
    shapes, pairs = (data.train, data.train_pairs) if part == "train" else (data.test, data.test_pairs)
    for shape, sample in zip(shapes, samples, strict=True):
        if sample.operators.num_vertices < map_k:
            raise DataError(
                f"{shape.name}: {sample.operators.num_vertices} vertices are too few for maps of {map_k} eigenpairs; "
                "lower --map-k"
            )
    truths = _Truths(data, shapes, samples, map_k) if with_targets and data.is_supervised else None

    def target(pair: Pair) -> Tensor:
        return unknown_map(map_k) if truths is None else truths.functional_map(pair)

    return [PairSample(samples[j], samples[i], partial(target, (i, j))) for i, j in pairs]


def unknown_map(k: int) -> Tensor:
    """The target (1, K, K) of a pair whose correspondences are not known."""
    return torch.full((1, k, k), torch.nan)


class _Truths:
    """True functional maps by least squares, from the correspondences of a set."""

    def __init__(self, data: MeshPairs, shapes: Sequence[PairShape], samples: Sequence[Sample], k: int) -> None:
        self._data, self._shapes, self._samples, self._k = data, shapes, samples, k
        self._values: dict[int, Tensor] = {}
        self._inverses: dict[int, Tensor] = {}

    def functional_map(self, pair: Pair) -> Tensor:
        """The map (1, K, K) from functions on the second mesh to functions on the first, on the device of the samples.

        Φ_first C ≈ Φ_second at the points that correspond. If each mesh has all points of a template, its
        eigenfunctions there and their pseudo-inverse are kept.
        """
        i, j = pair
        first, second = self._shapes[i], self._shapes[j]
        if first.template is not None and second.template is not None:
            c = self._inverse_at_template(i) @ self._at_template(j)
        else:
            truth = self._data.truth(first, second)
            if truth is None:
                return unknown_map(self._k)
            assert not isinstance(truth.points, SurfacePoints)  # only templates have points in faces
            evecs = self._evecs(i)
            points, vertices = (torch.from_numpy(x).to(evecs.device) for x in (truth.points, truth.vertices))
            c = functional_map_from_correspondences(points, vertices, self._evecs(j), evecs)
        return c.float()[None]

    def _evecs(self, number: int) -> Tensor:
        operators: Operators = self._samples[number].operators
        return operators.evecs[:, : self._k].float()

    def _at_template(self, number: int) -> Tensor:
        """The eigenfunctions of a mesh at the points of the template (T, K)."""
        if number not in self._values:
            shape, evecs = self._shapes[number], self._evecs(number)
            if isinstance(shape.template, SurfacePoints):
                corners = torch.from_numpy(shape.mesh.faces[shape.template.faces]).to(evecs.device)
                weights = torch.from_numpy(shape.template.weights).float().to(evecs.device)
                self._values[number] = (evecs[corners] * weights[:, :, None]).sum(1)
            else:
                self._values[number] = evecs[torch.as_tensor(shape.template, device=evecs.device)]
        return self._values[number]

    def _inverse_at_template(self, number: int) -> Tensor:
        """The pseudoinverse (K, T) of these values."""
        if number not in self._inverses:
            q, r = torch.linalg.qr(self._at_template(number).double())
            self._inverses[number] = (torch.linalg.pinv(r) @ q.mT).float()
        return self._inverses[number]
