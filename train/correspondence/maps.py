"""Functional maps of pairs from the features of a network, and maps of points from functional maps."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from diffnet.geometry import Operators, functional_map_from_points, point_map, to_spectral, zoomout
from diffnet.ops import bijectivity_loss, coupling_loss, functional_map, orthogonality_loss, segment_mean, soft_map
from diffnet.train.tasks.options.correspondence import Method

TEMPERATURE = 0.07  # of soft maps of normalized features (Cao et al. 2023)
ZOOMOUT_STEPS = 10


def pair_maps(features: Tensor, operators: Operators, method: Method, k: int, scale: float = 0.0) -> Tensor:
    """Compute the functional maps of pairs that a method needs. The first of each pair is the one to match with.

    features: (V, C), those of the network
    operators: meshes a and b of each of P pairs in turn, as `collate_pairs` packs them
    k: K, how many eigenpairs to use
    scale: root mean square to which the features of each mesh are scaled for the regularized maps; 0 for no scaling

    "supervised" returns (P, 1, K, K), the map from functions on a to functions on b that takes the features of a to
    those of b (Donati et al. 2020). "unsupervised" returns (P, 4, K, K): such maps from a to b and from b to a with the
    resolvent regularizer, and the maps from b to a and from a to b of the soft maps of points (Cao et al. 2023).
    """
    features = features.float()
    # One transform serves all meshes. Splitting the operators would also split their matrices, unused here.
    spectra, evals = to_spectral(features, operators)[:, :k], operators.evals[:, :k]
    if scale > 0:
        size = features.square().mean(1, keepdim=True)
        mean = segment_mean(size, operators.mass, operators.ptr, operators.lengths)
        spectra = spectra * (scale / mean.clamp(min=1e-12).sqrt())[:, :, None]
    a, b = (spectra[0::2], evals[0::2]), (spectra[1::2], evals[1::2])
    if method == "supervised":
        return functional_map(a[0], b[0], a[1], b[1], regularizer="squared_difference")[:, None]
    unit, evecs = (
        torch.split(x, list(operators.lengths)) for x in (F.normalize(features, dim=1), operators.evecs[:, :k])
    )
    others = [i ^ 1 for i in range(len(unit))]  # mesh 2p + 1 for mesh 2p, and mesh 2p for mesh 2p + 1
    mapped = [soft_map(unit[i], unit[j], evecs[j], TEMPERATURE) for i, j in enumerate(others)]
    soft = to_spectral(torch.cat(mapped), operators)[:, :k]
    there, back = functional_map(a[0], b[0], a[1], b[1]), functional_map(b[0], a[0], b[1], a[1])
    return torch.stack([there, back, soft[0::2], soft[1::2]], 1)


def unsupervised_loss(maps: Tensor) -> Tensor:
    """Bijectivity, orthogonality and coupling in both directions with equal weights, averaged over pairs.

    maps: (P, 4, K, K), those of the unsupervised method, see `pair_maps`
    """
    there, back, soft_back, soft_there = maps.unbind(1)
    return structure_loss(there, back) + coupling_loss(there, soft_there) + coupling_loss(back, soft_back)


def structure_loss(there: Tensor, back: Tensor) -> Tensor:
    """Bijectivity and orthogonality of maps (P, K, K) in both directions, averaged over pairs."""
    bijectivity = bijectivity_loss(there, back) + bijectivity_loss(back, there)
    return bijectivity + orthogonality_loss(there) + orthogonality_loss(back)


def point_map_of(c: Tensor, a: Operators, b: Operators, refine: bool) -> Tensor:
    """The vertex (V_b,) of a for each vertex of b, from a functional map (1, K, K) from a to b.

    refine: whether ZoomOut first refines the map, in 10 steps, to all eigenpairs. If it has more than half of them, it
        starts at half of them.

    Without ZoomOut, the map of points is turned into a functional map and back once, which makes it more accurate.
    """
    c = c.to(a.device)
    if refine:
        most = min(a.k, b.k, a.num_vertices, b.num_vertices)
        start = max(1, min(c.shape[-1], most // 2))
        c = zoomout(c[:, :start, :start], a, b, k=most, step=max(1, -(-(most - start) // ZOOMOUT_STEPS)))
    else:
        c = functional_map_from_points(point_map(c, a, b), a, b, k=c.shape[-1])
    return point_map(c, a, b)
