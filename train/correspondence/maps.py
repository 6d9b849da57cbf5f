"""Functional maps of pairs from the features of a network, maps of points from functional maps, and their scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

from diffnet.cuda_graphs.static_operators import StaticOperators
from diffnet.data import MeshPairs, PairErrors, PairSample, pair_errors
from diffnet.geometry import Operators, point_map, to_spectral, zoomout
from diffnet.ops import (
    Regularizer,
    bijectivity_loss,
    coupling_loss,
    functional_map,
    orthogonality_loss,
    segment_mean,
    soft_map,
)
from diffnet.train.correspondence.partial import matches_inside, overlap_scores
from diffnet.train.options import TrainOptions
from diffnet.train.options.correspondence import LOSS_TERMS, Method

TEMPERATURE = 0.07  # of soft maps of normalized features (Cao et al. 2023)
NEVER = -1e30  # takes a row out of a softmax
FURTHER = 4  # channels for it: one is enough, but rows of an odd length are slow to read
ZOOMOUT_STEPS = 10
EQUAL_WEIGHTS = dict.fromkeys(LOSS_TERMS, 1.0)


def pair_maps(
    features: Tensor,
    operators: Operators,
    method: Method,
    k: int,
    scale: float = 0.0,
    regularizer: Regularizer = "squared_difference",
) -> Tensor:
    """Compute the functional maps of pairs that a method needs. The first of each pair is the one to match with.

    features: (V, C), those of the network
    operators: meshes a and b of each of P pairs in turn, as `collate_pairs` packs them
    k: K, how many eigenpairs to use
    scale: root mean square to which the features of each mesh are scaled for the regularized maps; 0 for no scaling
    regularizer: of supervised maps, see `functional_map`

    "supervised" returns (P, 1, K, K), the map from functions on a to functions on b that takes the features of a to
    those of b (Donati et al. 2020). "unsupervised" returns (P, 4, K, K): such maps from a to b and from b to a with the
    resolvent regularizer, and the maps from b to a and from a to b of the soft maps of points (Cao et al. 2023). Only
    the losses need the soft maps, so without gradients it returns (P, 2, K, K).
    """
    features = features.float()
    # One transform serves all meshes. Splitting the operators would also split their matrices, unused here.
    spectra, evals = to_spectral(features, operators)[:, :k], operators.evals[:, :k]
    if scale > 0:
        size = features.square().mean(1, keepdim=True)
        mean = segment_mean(size, operators.mass, operators.ptr, operators.lengths)
        spectra = spectra * (scale / mean.clamp(min=1e-12).sqrt())[:, :, None]
    if method == "supervised":
        a, b = (spectra[0::2], evals[0::2]), (spectra[1::2], evals[1::2])
        return functional_map(a[0], b[0], a[1], b[1], regularizer=regularizer)[:, None]
    # From each mesh to the other one of its pair: mesh 2p + 1 for mesh 2p, and mesh 2p for mesh 2p + 1.
    other_spectra, other_evals = (_in_pairs(x).flip(1).flatten(0, 1) for x in (spectra, evals))
    maps = _in_pairs(functional_map(spectra, other_spectra, evals, other_evals))
    if not features.requires_grad:
        return maps
    queries, keys, evecs, mass = _by_mesh(F.normalize(features, dim=1), operators, k)
    images = [soft_map(query, keys[i ^ 1], evecs[i ^ 1], TEMPERATURE) for i, query in enumerate(queries)]
    soft = torch.stack([basis.mT @ (m * x) for basis, m, x in zip(evecs, mass, images, strict=True)])
    return torch.cat([maps, _in_pairs(soft)], 1)


def _in_pairs(x: Tensor) -> Tensor:
    """(2P, …) → (P, 2, …)"""
    return x.view(-1, 2, *x.shape[1:])


def _by_mesh(unit: Tensor, operators: Operators, k: int) -> list[Sequence[Tensor]]:
    """Queries, keys, eigenvectors and masses (…, 1) of each mesh, for features (V, C) of length 1.

    In a CUDA graph, all meshes have as many rows. Those outside of a mesh get no mass, and further channels take them
    out of the softmax.
    """
    tensors = [unit, operators.evecs[:, :k], operators.mass[:, None]]
    if not isinstance(operators, StaticOperators):
        parts = [torch.split(each, list(operators.lengths)) for each in tensors]
        return [parts[0], *parts]
    rows, inside = operators.rows_by_mesh()
    x, evecs, mass = (each.index_select(0, rows.flatten()).view(*rows.shape, -1) for each in tensors)
    further = torch.where(inside, 0, NEVER)[:, :, None].expand(-1, -1, FURTHER)
    keys, queries = torch.cat([x, further], 2), F.pad(x, (0, FURTHER), value=1)
    return [each.unbind() for each in (queries, keys, evecs, mass * inside[:, :, None])]


def unsupervised_loss(maps: Tensor, weights: Mapping[str, float] = EQUAL_WEIGHTS) -> Tensor:
    """Bijectivity, orthogonality and coupling in both directions, averaged over pairs.

    maps: (P, 4, K, K), those of the unsupervised method, see `pair_maps`; or (P, 2, K, K), which have no coupling
    weights: of the terms, see `CorrespondenceOptions.weight_of`
    """
    there, back, *soft = maps.unbind(1)
    terms = [("bijectivity", bijectivity_loss(there, back) + bijectivity_loss(back, there))]
    terms += [("orthogonality", orthogonality_loss(there)), ("orthogonality", orthogonality_loss(back))]
    if soft:
        soft_back, soft_there = soft
        terms += [("coupling", coupling_loss(there, soft_there)), ("coupling", coupling_loss(back, soft_back))]
    return reduce(add, (term if weights[name] == 1 else weights[name] * term for name, term in terms))


def point_map_of(c: Tensor, a: Operators, b: Operators, refine: bool = False) -> Tensor:
    """The vertex (V_b,) of a for each vertex of b, from a functional map (1, K, K) from a to b, see `point_map`.

    The nearest orthogonal map replaces c. refine: whether ZoomOut first adds all other eigenpairs, in 10 steps
    """
    c = c.to(a.device)
    most = min(a.k, b.k, a.num_vertices, b.num_vertices)
    if refine and c.shape[-1] < most:
        c = zoomout(c, a, b, k=most, step=max(1, -(-(most - c.shape[-1]) // ZOOMOUT_STEPS)), keep=True)
    return point_map(c, a, b, orthogonal=True)


@dataclass(frozen=True)
class ScoredPairs:
    """The test pairs of a set with their predicted maps.

    maps: for each test pair, a vertex of its second mesh for each vertex of its first mesh, (V,) int64; −1 for none, as
        outside of the predicted overlap of partial shapes
    errors: of each test pair; empty if the true correspondences are not known. Of partial shapes, those of the whole
        true overlap, if a network predicts it.
    overlaps: the scores of each test pair of partial shapes, see `overlap_scores`
    """

    data: MeshPairs
    maps: Sequence[NDArray[np.int64]]
    errors: Sequence[PairErrors]
    overlaps: Sequence[dict[str, float | None]] = ()


def score_pairs(
    data: MeshPairs,
    maps: Sequence[Tensor],
    samples: Sequence[PairSample],
    options: TrainOptions,
    device: torch.device,
    **where: Any,
) -> ScoredPairs:
    """Turn functional maps into maps of points, and measure these if the true correspondences are known.

    maps: (1, K, K) for each test pair
    samples: the test pairs
    options: `zoomout` of `point_map_of`
    where: cache_dir, jobs and console, see `geodesic_errors_of_all`
    """
    if options.partial:
        return _score_partial(data, maps, **where)
    point_maps = []
    for c, pair in zip(maps, samples, strict=True):
        a, b = pair.a.operators.to(device), pair.b.operators.to(device)
        point_maps.append(point_map_of(c, a, b, options.zoomout).cpu().numpy())
    return measured_pairs(data, point_maps, **where)


def measured_pairs(
    data: MeshPairs, maps: Sequence[NDArray[np.int64]], *, cache_dir: Path, jobs: int | None, console: Console
) -> ScoredPairs:
    """Measure maps of points, one for each test pair, if the true correspondences are known. See `score_pairs`."""
    if not data.is_supervised:
        return ScoredPairs(data, maps, ())
    with console.status("geodesic distances"):
        errors = pair_errors(data, data.test_shapes, maps, cache_dir=cache_dir, jobs=jobs)
    return ScoredPairs(data, maps, errors)


def _score_partial(data: MeshPairs, outputs: Sequence[Tensor], **how: Any) -> ScoredPairs:
    """See `overlap_outputs` and `measured_pairs`. Errors are those of the true overlap, whatever is predicted."""
    point_maps, overlaps, maps = [], [], []
    for rows, (first, second) in zip(outputs, data.test_shapes, strict=True):
        sides = torch.split(rows, [len(second.mesh.verts), len(first.mesh.verts)])
        (_, on_second), (matches, on_first) = map(matches_inside, sides)
        point_maps.append(matches)
        maps.append(np.where(on_first, matches, -1))
        if data.is_supervised:
            overlaps.append(overlap_scores([on_first, on_second], data.overlap(first, second)))
    return replace(measured_pairs(data, point_maps, **how), maps=maps, overlaps=overlaps)
