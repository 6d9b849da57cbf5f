"""From maps of points to functional maps and back, for one pair of shapes a and b.

A map of points takes each point of b to a point of a. Functions go the other way: a function on a, read at these
points, is a function on b. A functional map C (K_b, K_a) does the same to coefficients. `zoomout` goes to a map
of points and back, again and again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diffnet.ops.common.checks import check_count, check_finite, check_index, check_tensor, readable
from diffnet.ops.common.precision import promoted_dtype, sum_dtype, without_autocast
from diffnet.ops.functional_maps.nearest import nearest_neighbors


def point_map(c: Tensor, evecs_a: Tensor, evecs_b: Tensor, evals_a: Tensor | None = None) -> Tensor:
    """Find the vertex of a for each vertex of b.

    With evals_a, row v of Φ_b C is compared with the rows of Φ_a in the commute-time distance, where eigenvector j is
    divided by √λ_j (Rustamov 2007). Noise in high frequencies matters less, and C may change areas. Without evals_a,
    row v of Φ_b is compared with the rows of Φ_a Cᵀ (ZoomOut, Melzi et al. 2019), which is meant for maps that keep
    areas.

    Args:
        c: (K_b, K_a) floating point, a functional map from a to b
        evecs_a: (V_a, at least K_a) floating point, the eigenvectors. The first K_a are used.
        evecs_b: (V_b, at least K_b) floating point
        evals_a: floating point, one eigenvalue of each column of evecs_a. Those below the largest used one divided by
            K_a count as this quotient.

    Returns (V_b,) int64, vertices of a, without a gradient. Errors are those of `nearest_neighbors`, and ValueError for
    another number of eigenvalues.

    >>> point_map(torch.tensor([[1.0, 0.0], [0.0, -1.0]]), torch.eye(2), torch.tensor([[0.0, -1.0], [1.0, 0.0]]))
    tensor([1, 0])
    """
    _check_basis(c, evecs_a, evecs_b)
    if evals_a is not None:
        check_tensor("evals_a", evals_a, (evecs_a.shape[1],), c.device)
        check_finite("evals_a", evals_a)
    rows, columns = c.shape
    evecs_a, evecs_b = evecs_a[:, :columns], evecs_b[:, :rows]
    dtype = sum_dtype(c, evecs_a, evecs_b)
    c, evecs_a, evecs_b = (x.detach().to(dtype) for x in (c, evecs_a, evecs_b))
    with without_autocast(c):
        if evals_a is None or columns == 0:
            return nearest_neighbors(evecs_b, evecs_a @ c.mT)
        weights = _commute_time_weights(evals_a[:columns].detach().to(dtype))
        return nearest_neighbors(evecs_b @ c * weights, evecs_a * weights)


def _commute_time_weights(evals: Tensor) -> Tensor:
    """1 / √λ up to a common factor, (K,). Without a lower limit, eigenvalues near 0 would decide alone."""
    relative = evals / evals.amax().clamp(min=torch.finfo(evals.dtype).tiny)
    return relative.clamp(min=1 / len(evals)).rsqrt()


def _check_basis(c: Tensor, evecs_a: Tensor, evecs_b: Tensor) -> None:
    """Check a functional map (K_b, K_a) and eigenvectors of a (V_a, ≥ K_a) and b (V_b, ≥ K_b) on the same device.

    Raises TypeError or ValueError that names the value.
    """
    check_tensor("c", c, ("K_b", "K_a"))
    check_tensor("evecs_a", evecs_a, ("V_a", "K_a"), c.device)
    check_tensor("evecs_b", evecs_b, ("V_b", "K_b"), c.device)
    if evecs_a.shape[1] < c.shape[1] or evecs_b.shape[1] < c.shape[0]:
        raise ValueError(
            f"c of shape {tuple(c.shape)} needs {c.shape[1]} eigenvectors of a and {c.shape[0]} of b, "
            f"got {evecs_a.shape[1]} and {evecs_b.shape[1]}"
        )
    check_finite("c", c)


def functional_map_from_points(matches: Tensor, evecs_a: Tensor, evecs_b: Tensor, mass_b: Tensor) -> Tensor:
    """Compute Φ_b⁺ Π Φ_a, the functional map of a map of points. Differentiable in all but `matches`.

    Args:
        matches: (V_b,) int32 or int64, the vertex of a for each vertex of b
        evecs_a: (V_a, K_a) floating point
        evecs_b: (V_b, K_b) floating point
        mass_b: (V_b,) floating point, the areas of the vertices, with Φ_bᵀ diag(mass) Φ_b = I

    Returns:
        (K_b, K_a) in the promoted dtype

    Raises:
        TypeError: for arguments that are not tensors or have other dtypes.
        ValueError: for other shapes or devices.
        IndexError: on the CPU and in debug mode for a vertex out of range.

    >>> swap = torch.tensor([1, 0])
    >>> functional_map_from_points(swap, torch.eye(2), torch.eye(2), torch.ones(2))
    tensor([[0., 1.],
            [1., 0.]])
    """
    check_tensor("evecs_b", evecs_b, ("V_b", "K_b"))
    device = evecs_b.device
    check_tensor("evecs_a", evecs_a, ("V_a", "K_a"), device)
    check_tensor("mass_b", mass_b, (len(evecs_b),), device)
    _check_vertices("matches", matches, len(evecs_a), len(evecs_b), device)
    dtype = promoted_dtype(evecs_a, evecs_b, mass_b)
    with without_autocast(evecs_b):
        return (evecs_b * mass_b[:, None]).to(dtype).mT @ evecs_a[matches.long()].to(dtype)


def functional_map_from_correspondences(
    vertices_a: Tensor, vertices_b: Tensor, evecs_a: Tensor, evecs_b: Tensor
) -> Tensor:
    """Compute the functional map of known correspondences by least squares: Φ_b[vertices_b] C ≈ Φ_a[vertices_a].

    It needs correspondences at some points only, and no areas. Of several solutions, the smallest is returned. It is
    computed in float64.

    Args:
        vertices_a, vertices_b: (N,) int32 or int64, vertices that correspond to each other; N is at least K_b
        evecs_a: (V_a, K_a) floating point
        evecs_b: (V_b, K_b) floating point

    Returns:
        (K_b, K_a) in the promoted dtype, and in float32 for lower precision

    Raises:
        TypeError: for arguments that are not tensors or have other dtypes.
        ValueError: for other shapes or devices, and for fewer points than eigenvectors of b.
        IndexError: on the CPU and in debug mode for a vertex out of range.

    >>> vertices = torch.tensor([0, 1, 2])
    >>> functional_map_from_correspondences(vertices, vertices.flip(0), torch.eye(3), torch.eye(3))
    tensor([[0., 0., 1.],
            [0., 1., 0.],
            [1., 0., 0.]])
    """
    check_tensor("evecs_a", evecs_a, ("V_a", "K_a"))
    device = evecs_a.device
    check_tensor("evecs_b", evecs_b, ("V_b", "K_b"), device)
    _check_vertices("vertices_a", vertices_a, len(evecs_a), None, device)
    _check_vertices("vertices_b", vertices_b, len(evecs_b), len(vertices_a), device)
    if len(vertices_a) < evecs_b.shape[1]:
        raise ValueError(
            f"{evecs_b.shape[1]} eigenvectors need as many correspondences, got {len(vertices_a)}; "
            "give more points or fewer eigenvectors"
        )
    check_finite("evecs_a", evecs_a)
    check_finite("evecs_b", evecs_b)
    dtype = sum_dtype(evecs_a, evecs_b)
    from_a, from_b = evecs_a[vertices_a.long()].double(), evecs_b[vertices_b.long()].double()
    # `torch.linalg.lstsq` needs full rank on a GPU. Without it, its results on the CPU vary from call to call (2.13).
    q, r = torch.linalg.qr(from_b)
    c: Tensor = torch.linalg.pinv(r) @ (q.mT @ from_a)
    return c.to(dtype)


def _check_vertices(name: str, vertices: Tensor, count: int, rows: int | None, device: torch.device) -> None:
    """Check vertex numbers (rows,) from 0 to count − 1. Their values are checked on the CPU and in debug mode.

    Raises TypeError or ValueError as `check_index` does, IndexError for a number out of range.
    """
    check_index(name, vertices, None if rows is None else (rows,), device)
    if readable(vertices):
        wrong = (vertices < 0) | (vertices >= count)
        if wrong.any():
            at = int(wrong.nonzero()[0])
            raise IndexError(f"{name} should be from 0 to {count - 1}, got {int(vertices[at])} at index {at}")


def zoomout(
    c: Tensor,
    evecs_a: Tensor,
    evecs_b: Tensor,
    mass_b: Tensor,
    *,
    k: int | None = None,
    step: int = 1,
    keep: bool = False,
) -> Tensor:
    """Refine a functional map (ZoomOut): turn it into a map of points and back, each time with more eigenfunctions.

    The last step takes as many eigenfunctions as are left. Equal sizes of c and k refine once at this size.

    Args:
        c: (K_b, K_a) floating point, a map from functions on a to functions on b
        evecs_a, evecs_b: (V_a, at least k) and (V_b, at least k) floating point
        mass_b: (V_b,) floating point
        k: the number of eigenfunctions of the result, at least those of c. By default all that both shapes have.
        step: how many eigenfunctions to add at a time
        keep: whether the entries of c stay as they are, so that a map of k eigenfunctions is the result. That is better
            for maps of many eigenfunctions, whose entries are more accurate than those of a map of points.

    The maps of points are those of `point_map` without eigenvalues: maps of points give functional maps that are nearly
    orthogonal, and its comparison also fits the first c.

    Returns:
        (k, k) in the promoted dtype. It has no gradient.

    Raises:
        TypeError: for arguments of other types.
        ValueError: for other shapes and devices, and a k or step out of range.

    Source: Melzi et al. 2019, ZoomOut: Spectral Upsampling for Efficient Shape Correspondence.

    >>> zoomout(torch.eye(1), torch.eye(3), torch.eye(3), torch.ones(3)).shape
    torch.Size([3, 3])
    """
    _check_basis(c, evecs_a, evecs_b)
    check_tensor("mass_b", mass_b, (len(evecs_b),), c.device)
    most, step = min(evecs_a.shape[1], evecs_b.shape[1]), check_count("step", step, 1)
    k = most if k is None else check_count("k", k, 1)
    if not max(c.shape) <= k <= most:
        raise ValueError(f"k should be from {max(c.shape)}, as in c, to {most} eigenvectors, got {k}")
    with torch.no_grad():
        first, (k_b, k_a) = c, c.shape
        while True:
            matches = point_map(c, evecs_a, evecs_b)
            k_a, k_b = min(k_a + step, k), min(k_b + step, k)
            c = functional_map_from_points(matches, evecs_a[:, :k_a], evecs_b[:, :k_b], mass_b)
            if keep:
                c[: len(first), : first.shape[1]] = first
            if k_a == k_b == k:
                return c
