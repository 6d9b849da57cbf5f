"""Curvature at the vertices: from the shape operator, and at several scales in the eigenbasis."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from diffnet.geometry.augmentation.transforms import per_vertex
from diffnet.geometry.batches.functional import check_operators, to_spectral, with_eigenpairs
from diffnet.geometry.operators import Operators
from diffnet.ops import from_spectral
from diffnet.ops.common.checks import check_finite, check_tensor

TIMES = (0.001, 0.003, 0.01, 0.03)  # shares of the area


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
    own, neighbor = frames[rows, 2], frames[columns, 2]
    agrees = (own * neighbor).sum(1, keepdim=True) >= 0
    turn = torch.where(agrees, neighbor, -neighbor) - own
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
    own_mesh = per_vertex(operators, torch.arange(meshes, device=mass.device))
    area = mass.new_zeros(meshes).index_add(0, own_mesh, mass)
    center = positions.new_zeros(meshes, 3).index_add(0, own_mesh, mass[:, None].to(positions) * positions)
    centered = positions - (center / area[:, None].to(positions))[own_mesh]
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
