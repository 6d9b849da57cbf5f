"""Mass, cotangent Laplacian, frames and gradient of packed meshes in PyTorch, differentiable in the positions.

These are the formulas of the other files of this folder, which are for one mesh and in NumPy. Sums are added in their
order where the order matters: rounding decides where the tangent frames of symmetric meshes start.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from diffnet.geometry.discretize.connectivity import Connectivity, sums
from diffnet.geometry.discretize.frames import MIN_NORMAL
from diffnet.geometry.discretize.gradient import MIN_SPREAD
from diffnet.geometry.discretize.laplacian import ADDED_CROSS, MIN_MASS


class Triangles(NamedTuple):
    """The shapes of the usable faces.

    edges: (F, 3, 3), from each corner to the next
    normals: (F, 3), as long as twice the area of a face in units of its mesh; those of turned faces are turned
    doubled: (F,), twice the area
    """

    edges: Tensor
    normals: Tensor
    doubled: Tensor


def triangles(c: Connectivity, positions: Tensor) -> Triangles:
    corners = F.embedding(c.usable, positions)  # its backward adds up in a fixed order
    edges = corners.roll(-1, 1) - corners
    extents = edges.detach().abs().amax(2)
    extents[:, 1] = 0  # the unit of `tangent_frames` has these two edges
    unit = c.per_mesh.maxima(c.by_vertex.maxima(extents.reshape(-1)))
    unit = torch.where(unit > 0, unit, 1)[c.mesh[c.usable[:, 0]]]
    normals = cross(edges[:, 0] / unit[:, None], -edges[:, 2] / unit[:, None])
    doubled = length(normals) * unit * unit
    return Triangles(edges, normals if c.turned is None else torch.where(c.turned, -normals, normals), doubled)


def raised_mass(c: Connectivity, areas: Tensor) -> Tensor:
    """The mass (V,) of vertices with these areas, and a little for a vertex whose faces have no area."""
    used = c.per_mesh.sums(c.used.double())
    mean = c.per_mesh.sums(areas.detach()) / used.clamp(min=1)
    return torch.where(c.used, areas.maximum(MIN_MASS * mean[c.mesh]), 0)


def cotan_laplacian(c: Connectivity, positions: Tensor, edges: Tensor, doubled: Tensor) -> Tensor:
    """The entries (nnz,) of the cotangent Laplacian on the pattern of the connectivity."""
    # The edge from corner i to the next is opposite to corner i + 2, between the edges i + 1 and i + 2.
    dots = -dot(edges.roll(-1, 1), edges.roll(-2, 1))
    floor = ADDED_CROSS * radius(c, positions.detach()) ** 2
    weights = (dots / (doubled + floor[c.mesh[c.usable[:, 0]]])[:, None] / 2).reshape(-1)
    joined = -c.by_entry.sums(torch.cat([weights, weights, weights.new_zeros(len(c.mesh))]))
    return with_diagonal(joined, c.rows, c.columns, c.entries_of_rows)


def with_diagonal(joined: Tensor, rows: Tensor, columns: Tensor, lengths: Tensor) -> Tensor:
    """The entries of a matrix whose rows sum to 0, from those beside the diagonal."""
    return torch.where(rows == columns, -sums(joined, lengths)[rows], joined)


def radius(c: Connectivity, positions: Tensor) -> Tensor:
    """The largest distance (B,) of the vertices of each mesh from their mean. Vertices without faces don't count."""
    used = c.used[:, None]
    count = c.per_mesh.sums(c.used.double()).clamp(min=1)
    center = c.per_mesh.sums(torch.where(used, positions, 0)) / count[:, None]
    return c.per_mesh.maxima(length(torch.where(used, positions - center[c.mesh], 0)))


def frames(c: Connectivity, normals: Tensor) -> Tensor:
    """Tangent frames (V, 3, 3), see `tangent_frames`. normals: see `Triangles`"""
    total = c.by_vertex.sums(normals.repeat_interleave(3, 0))
    area = length(normals.detach())
    of_corners = area.repeat_interleave(3)
    cancelled = length(total.detach()) < MIN_NORMAL * c.by_vertex.sums(of_corners)
    # The largest face of each vertex, the last one among equal ones.
    largest = c.by_vertex.maxima(of_corners)[c.tail]
    number = torch.arange(len(area), device=area.device, dtype=area.dtype).repeat_interleave(3)
    last = c.by_vertex.maxima(torch.where(of_corners == largest, number, 0)).long()
    total = torch.where(cancelled[:, None], F.embedding(last, normals), total)
    size = length(total)[:, None]
    upward = torch.zeros_like(total[:1])
    upward[:, 2] = 1
    normal = torch.where(size > 0, total / torch.where(size > 0, size, 1), upward)
    # The coordinate axis farthest from the normal, the first of equals.
    x, y, z = normal.detach().abs().unbind(1)
    axis = torch.where((x <= y) & (x <= z), 0, torch.where(y <= z, 1, 2))[:, None]
    tangent = torch.zeros_like(normal).scatter(1, axis, 1) - normal.gather(1, axis) * normal
    tangent = tangent / length(tangent)[:, None]
    return torch.stack([tangent, cross(normal, tangent), normal], 1)


def gradient(c: Connectivity, positions: Tensor, frames: Tensor) -> Tensor:
    """Values (2, nnz) of the gradient on the pattern of the connectivity, see `gradient_values`."""
    ends = F.embedding(torch.stack([c.rows, c.columns]), positions)
    tangents = F.embedding(c.rows, frames[:, :2].flatten(1)).view(-1, 2, 3)
    x, y = dot(tangents, (ends[1] - ends[0])[:, None]).unbind(1)
    xx, xy, yy = sums(torch.stack([x * x, x * y, y * y], 1), c.entries_of_rows).unbind(1)
    # The eigenvalues of the normal equations are mean ± deviation.
    mean, deviation = (xx + yy) / 2, length(torch.stack([(xx - yy) / 2, xy], 1))
    low, high = mean - deviation, mean + deviation
    # Where edges hardly extend in one direction, raise its eigenvalue to MIN_SPREAD times the other:
    # N + (MIN_SPREAD · high − low) (high · I − N) / (high − low)
    raised = low.detach() < MIN_SPREAD * high.detach()
    share = torch.where(raised, (MIN_SPREAD * high - low) / torch.where(raised & (deviation > 0), 2 * deviation, 1), 0)
    xx, xy, yy = xx + share * (high - xx), (1 - share) * xy, yy + share * (high - yy)
    determinant = xx * yy - xy * xy
    has_edges = high.detach() > 0
    inverse = torch.stack([yy, -xy, xx], 1) / torch.where(has_edges, determinant, 1)[:, None]
    solve = F.embedding(c.rows, torch.where(has_edges[:, None], inverse, 0))
    values = torch.stack([solve[:, 0] * x + solve[:, 1] * y, solve[:, 1] * x + solve[:, 2] * y], 1)
    totals = F.embedding(c.rows, sums(values, c.entries_of_rows))
    return torch.where((c.rows == c.columns)[:, None], values - totals, values).T.contiguous()


def length(vectors: Tensor) -> Tensor:
    """The length of each vector. A vector 0 has gradient 0, where that of `norm` is not a number."""
    squared = dot(vectors, vectors)
    return torch.where(squared > 0, squared.clamp(min=torch.finfo(squared.dtype).tiny).sqrt(), squared)


def dot(u: Tensor, v: Tensor) -> Tensor:
    """Scalar products, added in order: the order of `sum` on a GPU is that of its threads."""
    first, *others = (u * v).unbind(-1)
    return sum(others, first)


def cross(u: Tensor, v: Tensor) -> Tensor:
    """Cross products, rounded like NumPy's on every device: one kernel for all would fuse products and differences."""
    return u.roll(-1, 1) * v.roll(-2, 1) - u.roll(-2, 1) * v.roll(-1, 1)
