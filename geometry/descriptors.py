"""Descriptors: features at the vertices that need no learning. They are spectral, or curvature."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor
from torch.nn.functional import normalize

from diffnet.geometry.batches.functional import (
    check_operators,
    mesh_mean,
    present_pairs,
    spread,
    to_spectral,
    with_eigenpairs,
)
from diffnet.geometry.errors import refuses
from diffnet.geometry.operators import Operators
from diffnet.ops import from_spectral
from diffnet.ops.common.checks import check_count, check_finite, check_tensor, readable
from diffnet.ops.common.precision import without_autocast

MIN_TIME, MAX_TIME = 0.01, 1.0  # default times of `hks`
_warned_of_size: list[str] = []  # names of given warnings; each is given once
TIMES = (0.001, 0.003, 0.01, 0.03)  # default times of `diffused_curvature`, shares of the area


@refuses("write hks(operators, 16) or hks(operators, scales=scales)", evals="operators", evecs="operators")
def hks(operators: Operators, count: int = 16, *, scales: Tensor | None = None) -> Tensor:
    """Heat kernel signature Σ_k exp(−λ_k t) φ_k(v)² (Sun et al. 2009) at each vertex and time, (V, T).

    count: number of times, if `scales` is not given
    scales: (T,) times. By default they are spaced logarithmically from 0.01 to 1, which suits shapes of unit size (see
        `normalize_positions`). On the CPU, this warns once if they don't fit the size of a mesh.

    Raises ValueError for operators without eigenpairs, for a count below 1, and on the CPU for times that are negative
    or not finite.

    >>> from diffnet.geometry import precompute
    >>> operators = precompute(([[0, 0, 0], [1, 0, 0], [0, 1, 0]], [[0, 1, 2]]), k=2)
    >>> hks(operators, 4).shape
    torch.Size([3, 4])
    """
    with_eigenpairs("hks", operators)
    check_count("count", count, 1)
    if scales is None:
        _warn_of_size(operators)
        scales = hks_times(count)
    else:
        check_tensor("scales", scales, ("T",))
        check_finite("scales", scales, least=0)
    scales = scales.to(operators.evals)
    return _weighted_squares(operators, torch.exp(-operators.evals[:, :, None] * scales))


def hks_times(count: int = 16, device: torch.device | str = "cpu") -> Tensor:
    """The default times of `hks`, (count,) float32."""
    return torch.logspace(math.log10(MIN_TIME), math.log10(MAX_TIME), count, dtype=torch.float32, device=device)


def wks(operators: Operators, count: int = 16, *, unit: bool = False) -> Tensor:
    """Wave kernel signature (Aubry et al. 2011) at each vertex and energy, (V, count).

    The energies of each mesh are spaced evenly in log λ over its own spectrum, so the signature depends on the size of
    the mesh only by a factor. Energies range from 2σ above the first log λ to 2σ below the last, with σ = 7/128 of the
    range of log λ. These are the paper's values for 100 energies, used here for every count. Null vectors and missing
    vectors are left out.

    unit: divide each column by its root mean square over the mesh. With 128 columns, it is the input of published
        networks (Cao et al. 2023).

    Raises ValueError for operators without eigenpairs and for a count below 1.
    """
    with_eigenpairs("wks", operators)
    check_count("count", count, 1)
    evals = operators.evals
    # If a mesh has fewer than K pairs, the missing pairs have zero vectors. They must not count in the sum of weights.
    live = present_pairs(operators) & (evals > 1e-6 * evals[:, -1:])
    log_evals = torch.log(torch.where(live, evals, 1.0))
    has_pairs = live.any(1)
    low = torch.where(has_pairs, torch.where(live, log_evals, math.inf).amin(1), 0.0)[:, None]
    high = torch.where(has_pairs, torch.where(live, log_evals, -math.inf).amax(1), 0.0)[:, None]
    sigma = ((high - low) * 7 / 128).clamp(min=1e-3)  # the range is 0 if there is one eigenvalue
    steps = torch.linspace(0, 1, count, dtype=evals.dtype, device=evals.device)
    energies = low + 2 * sigma + steps * (high - low - 4 * sigma)
    weights = torch.exp(-(((energies[:, None, :] - log_evals[:, :, None]) / sigma[..., None]) ** 2) / 2)
    weights = torch.where(live[:, :, None], weights, 0.0)
    total = weights.sum(1, keepdim=True)
    values = _weighted_squares(operators, weights / torch.where(total > 0, total, 1.0))
    if not unit:
        return values
    size = mesh_mean(values.square(), operators).sqrt().clamp(min=torch.finfo(values.dtype).tiny)
    return values / spread(size, operators)


def _warn_of_size(operators: Operators) -> None:
    """Warn, the first time, of a mesh at which most of the default times of `hks` give nearly the same values.

    With the smallest positive eigenvalue λ₁ and the largest λ_K, exp(−λ t) is nearly 0 for all λ > 0 if λ₁ t is large,
    and nearly 1 if λ_K t is small. The bounds on the area keep shapes of unit size from a warning whose spectrum is
    unusual, such as many small parts.
    """
    if _warned_of_size or not (readable(operators.evals) and readable(operators.mass)):
        return
    middle = math.sqrt(MIN_TIME * MAX_TIME)
    masses = torch.split(operators.mass, list(operators.lengths))
    for number, (values, mass) in enumerate(zip(operators.evals.tolist(), masses, strict=True)):
        positive = [value for value in values if value > 1e-6 * values[-1]]
        if not positive:
            continue
        area, smallest, largest = float(mass.sum()), positive[0], positive[-1]
        small = smallest * middle > 4 and area < 1
        if not small and not (largest * middle < 1 and area > 50):
            continue
        which = f"mesh {number} of the batch" if len(operators) > 1 else "the mesh"
        effect = "too long for {}, so all vertices have" if small else "too short for {}, so all times have"
        message = (
            f"hks: most of the default times, {MIN_TIME:g} to {MAX_TIME:g}, are {effect.format(which)} nearly the same "
            f"value. Its area is {area:.3g}, and its eigenvalues above 0 run from {smallest:.3g} to {largest:.3g}. "
            "Use precompute(…, normalize=True), or pass `scales` near 1/λ"
        )
        _warned_of_size.append(message)
        warnings.warn(message, stacklevel=4)  # the caller of `hks`, which is wrapped once
        return


def _weighted_squares(operators: Operators, weights: Tensor) -> Tensor:
    """Σ_k w_k φ_k(v)², (V, T), for weights (B, K, T)."""
    # A basis in half precision is squared in the precision of the rest.
    squares = operators.evecs.to(operators.evals.dtype) ** 2
    with without_autocast(squares):
        return from_spectral(weights, squares, operators.ptr, operators.lengths)


def curvature(operators: Operators) -> Tensor:
    """Mean and Gaussian curvature at the vertices of meshes and point clouds, (V, 2).

    The first column is the mean curvature, in 1/length. It is positive where the surface bends away from its normal, as
    on a sphere with outward normals. The second is the Gaussian curvature, in 1/length².

    Both come from the shape operator, the derivative of the normal along the surface: half its trace, and its
    determinant. It is computed from the normals of `operators.frames` and the gradient. Where the normal of a neighbor
    points to the other side, it is turned first. The curvature of a vertex without neighbors is 0.

    Raises TypeError for an argument of another type.

    >>> import trimesh
    >>> from diffnet.geometry import precompute
    >>> ball = precompute(trimesh.creation.icosphere(3, radius=2.0), k=0)
    >>> mean, gaussian = curvature(ball).mean(0).tolist()  # of a sphere, 1/radius and 1/radius²
    >>> round(mean, 2), round(gaussian, 2)
    (0.5, 0.25)
    """
    check_operators(operators)
    pattern, frames = operators.gradient.pattern, operators.frames
    rows, columns = pattern.row_indices, pattern.column_indices
    normal, neighbor = frames[rows, 2], frames[columns, 2]
    agrees = (normal * neighbor).sum(1, keepdim=True) >= 0
    turn = torch.where(agrees, neighbor, -neighbor) - normal
    along = (frames[rows, :2] * turn[:, None]).sum(2)  # (nnz, 2), the turn along both tangents
    entries = operators.gradient.values[:, :, None] * along
    shape = frames.new_zeros(2, len(frames), 2).index_add(1, rows, entries)  # its derivative along X and Y
    mixed = (shape[0, :, 1] + shape[1, :, 0]) / 2  # the two are equal but for errors of the discretization
    mean = (shape[0, :, 0] + shape[1, :, 1]) / 2
    gaussian = shape[0, :, 0] * shape[1, :, 1] - mixed**2
    return torch.stack([mean, gaussian], 1)


def diffused_curvature(positions: Tensor, operators: Operators, *, times: Tensor | None = None) -> Tensor:
    """Mean and Gaussian curvature of diffused positions and normals at each vertex and time, (V, T, 2).

    positions: (V, 3) floating point, of the vertices
    times: (T,) shares of the area of each mesh. A mesh of area A is diffused for the times A · `times`, which averages
        over regions of about √(4 A t) in diameter. The default is 0.001, 0.003, 0.01 and 0.03.

    The last axis has the mean curvature H, in 1/length, and the Gaussian curvature K, in 1/length². H is positive where
    the surface bends away from its normal, see `curvature`. With x_t and n_t the positions and normals after diffusion
    for a time t, L the Laplacian and n = n_t / |n_t|, H = n · L x_t / 2 and K = (4 H² − n · L n_t) / 2. These are the
    curvatures of a smooth surface for t → 0, because L x = 2 H n and the normal part of L n is 4 H² − 2 K.

    All of it is computed from the eigenpairs. So the result depends on the triangulation much less than that of
    `curvature`, and 128 eigenpairs resolve the default times.

    Raises ValueError for operators without eigenpairs, for other shapes, and on the CPU for times that are negative or
    not finite; TypeError for arguments of another type.

    >>> import trimesh
    >>> from diffnet.geometry import precompute
    >>> mesh = trimesh.creation.icosphere(3, radius=2.0)
    >>> ball = precompute(mesh, k=16)
    >>> found = diffused_curvature(torch.tensor(mesh.vertices), ball, times=torch.tensor([1e-4]))
    >>> mean, gaussian = found.mean((0, 1)).tolist()  # of a sphere, 1/radius and 1/radius²
    >>> round(mean, 2), round(gaussian, 2)
    (0.5, 0.25)
    """
    with_eigenpairs("diffused_curvature", operators)
    check_tensor("positions", positions, (operators.num_vertices, 3), operators.device)
    mass, evals, meshes = operators.mass, operators.evals, len(operators)
    if times is None:
        times = evals.new_tensor(TIMES)
    check_tensor("times", times, ("T",))
    check_finite("times", times, least=0)
    mesh_numbers = spread(torch.arange(meshes, device=mass.device), operators)
    area = mass.new_zeros(meshes).index_add(0, mesh_numbers, mass)
    center = positions.new_zeros(meshes, 3).index_add(0, mesh_numbers, mass[:, None].to(positions) * positions)
    centered = positions - (center / area[:, None].to(positions))[mesh_numbers]
    # Positions in double precision are rounded only after they are centered.
    spectrum = to_spectral(torch.cat([centered.to(mass), operators.normals], 1), operators)  # (B, K, 6)
    decay = torch.exp(-evals[:, :, None] * area[:, None, None] * times.to(evals))[..., None]  # (B, K, T, 1)
    laplacians = evals[:, :, None, None] * decay * spectrum[:, :, None]
    normals = decay * spectrum[:, :, None, 3:]
    # A basis in half precision is used in the precision of the rest.
    evecs, coefficients = operators.evecs.to(evals.dtype), torch.cat([laplacians, normals], 3).flatten(2)
    values = from_spectral(coefficients, evecs, operators.ptr, operators.lengths)
    values = values.reshape(len(values), len(times), 9)
    normal = normalize(values[..., 6:], dim=2)
    mean = (normal * values[..., :3]).sum(2) / 2
    return torch.stack([mean, (4 * mean**2 - (normal * values[..., 3:6]).sum(2)) / 2], 2)
