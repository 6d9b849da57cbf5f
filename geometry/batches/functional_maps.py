"""Maps between the shapes of two batches, pair by pair: mesh p of batch a and mesh p of batch b.

Each function calls the operation of `diffnet.ops` with the same name. Autocast doesn't lower its precision.
docs/functional_maps.md shows the functions together.

Shapes: P pairs, V_a and V_b packed vertices, C channels, K eigenpairs. With `k`, the first k of each shape count.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from diffnet import ops
from diffnet.geometry.batches.functional import to_spectral, with_eigenpairs
from diffnet.geometry.operators import Operators
from diffnet.ops import Backend, Regularizer
from diffnet.ops.common.checks import check_count, check_tensor, not_a_tensor
from diffnet.ops.common.precision import without_autocast


def functional_map(
    x_a: Tensor,
    x_b: Tensor,
    a: Operators,
    b: Operators,
    *,
    k: int | None = None,
    regularizer: Regularizer = "resolvent",
    weight: float | Tensor | None = None,
    gamma: float | Tensor = 0.5,
    backend: Backend = "auto",
) -> Tensor:
    """Compute the functional maps from a to b that take the features x_a to x_b.

    x_a, x_b: (V_a, C) and (V_b, C) floating point
    k: how many eigenpairs to use, by default all
    regularizer, weight, gamma: see `ops.functional_map`
    backend: see `to_spectral`

    Returns (P, K_b, K_a). It is differentiable in x_a and x_b. Raises ValueError for batches of different lengths,
    operators without eigenpairs and other shapes, TypeError for arguments of other types.

    >>> import torch
    >>> from diffnet.geometry import hks, precompute
    >>> triangle = precompute(([[0, 0, 0], [1, 0, 0], [0, 2, 0]], [[0, 1, 2]]), k=3)
    >>> x = torch.eye(3)
    >>> functional_map(x, x, triangle, triangle).round(decimals=4).abs()[0]
    tensor([[1., 0., 0.],
            [0., 1., 0.],
            [0., 0., 1.]])
    """
    check_pairs("functional_map", a, b)
    k_a, k_b = _sizes(k, a, b)
    with without_autocast(a.mass):
        spectrum_a, spectrum_b = to_spectral(x_a, a, backend=backend), to_spectral(x_b, b, backend=backend)
    return ops.functional_map(
        spectrum_a[:, :k_a],
        spectrum_b[:, :k_b],
        a.evals[:, :k_a],
        b.evals[:, :k_b],
        regularizer=regularizer,
        weight=weight,
        gamma=gamma,
        backend=backend,
    )


def soft_functional_map(
    x_a: Tensor,
    x_b: Tensor,
    a: Operators,
    b: Operators,
    *,
    temperature: float | Tensor = 0.07,
    k: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute Φ_b⁺ Π Φ_a, the functional maps of the soft maps Π = softmax(x_b x_aᵀ / temperature).

    x_a, x_b: (V_a, C) and (V_b, C) floating point. The temperature is meant for rows of length 1, as
        `torch.nn.functional.normalize` returns them.
    k: how many eigenpairs to use, by default all
    backend: see `to_spectral`

    Returns (P, K_b, K_a). It is differentiable in x_a, x_b and the temperature. No table (V_b, V_a) is stored. For
    errors see `functional_map`.
    """
    check_pairs("soft_functional_map", a, b)
    k_a, k_b = _sizes(k, a, b)
    _check_rows("x_a", x_a, a)
    _check_rows("x_b", x_b, b)
    queries, keys, evecs = (
        torch.split(tensor, list(side.lengths)) for tensor, side in ((x_b, b), (x_a, a), (a.evecs[:, :k_a], a))
    )
    mapped = [ops.soft_map(*pair, temperature) for pair in zip(queries, keys, evecs, strict=True)]
    with without_autocast(b.mass):
        return ops.to_spectral(torch.cat(mapped), b.evecs[:, :k_b], b.mass, b.ptr, b.lengths, backend)


def functional_map_from_points(matches: Tensor, a: Operators, b: Operators, *, k: int | None = None) -> Tensor:
    """Compute Φ_b⁺ Π Φ_a, the functional maps of maps of points.

    matches: (V_b,) int32 or int64. For each vertex of b, the vertex of its partner in a, counted within that mesh.
    k: how many eigenpairs to use, by default all

    Returns (P, K_b, K_a). For errors see `functional_map` and `ops.functional_map_from_points`.
    """
    check_pairs("functional_map_from_points", a, b)
    k_a, k_b = _sizes(k, a, b)
    _check_rows("matches", matches, b)
    maps = [
        ops.functional_map_from_points(found, one.evecs[:, :k_a], other.evecs[:, :k_b], other.mass)
        for found, one, other in zip(torch.split(matches, list(b.lengths)), a, b, strict=True)
    ]
    return torch.stack(maps)


def point_map(c: Tensor, a: Operators, b: Operators) -> Tensor:
    """Find the vertex of a for each vertex of b, by functional maps from a to b, in the commute-time distance.

    c: (P, K_b, K_a) floating point, with at most as many eigenpairs as the operators have

    Vertices of a without mass, which no face uses, are no partners.

    Returns (V_b,) int64, counted within the mesh of a. `b.unpack(matches)` is a list with one tensor for each pair.
    For errors see `functional_map` and `ops.point_map`.
    """
    found = []
    for own, one, other in _each("point_map", c, a, b):
        partners = torch.nonzero(one.mass > 0)[:, 0]
        found.append(partners[ops.point_map(own, one.evecs[partners], other.evecs, one.evals[0])])
    return torch.cat(found)


def zoomout(c: Tensor, a: Operators, b: Operators, *, k: int | None = None, step: int = 1) -> Tensor:
    """Refine functional maps (ZoomOut, Melzi et al. 2019): to maps of points and back, with more eigenpairs each time.

    c: (P, K_b, K_a) floating point, maps from a to b
    k: the number of eigenpairs of the result, by default all
    step: how many eigenpairs to add at a time

    Returns (P, k, k), without gradient. For errors see `functional_map` and `ops.zoomout`.
    """
    pairs = _each("zoomout", c, a, b)
    refined = [
        ops.zoomout(own, one.evecs[one.mass > 0], other.evecs, other.mass, k=k, step=step) for own, one, other in pairs
    ]
    return torch.stack(refined)


def check_pairs(name: str, a: Operators, b: Operators) -> None:
    """Check that two batches have eigenpairs and as many meshes.

    Raises TypeError for arguments that are no operators, else ValueError.
    """
    with_eigenpairs(name, a)
    with_eigenpairs(name, b)
    if len(a) != len(b) or len(a) == 0:
        raise ValueError(f"{name} maps mesh after mesh, but the batches have {len(a)} and {len(b)} meshes")


def _sizes(k: int | None, a: Operators, b: Operators) -> tuple[int, int]:
    if k is None:
        return a.k, b.k
    if check_count("k", k, 1) > min(a.k, b.k):
        raise ValueError(f"k should be at most {min(a.k, b.k)}, as the operators have {a.k} and {b.k}, got {k}")
    return k, k


def _check_rows(name: str, x: Tensor, operators: Operators) -> None:
    if not isinstance(x, Tensor):
        raise not_a_tensor(name, x)
    if x.ndim == 0 or len(x) != operators.num_vertices:
        raise ValueError(f"{name} should have {operators.num_vertices} rows, shape is {tuple(x.shape)}")


def _each(name: str, c: Tensor, a: Operators, b: Operators) -> Iterator[tuple[Tensor, Operators, Operators]]:
    """Each functional map with its two shapes."""
    check_pairs(name, a, b)
    check_tensor("c", c, (len(a), "K_b", "K_a"))
    return zip(c, a, b, strict=True)
