"""Operators as differentiable functions of the positions of the vertices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from diffnet.geometry.discretize.frames import MIN_NORMAL
from diffnet.geometry.discretize.gradient import MIN_SPREAD
from diffnet.geometry.discretize.laplacian import ADDED_CROSS, MIN_MASS
from diffnet.geometry.operators import Operators
from diffnet.ops import Pattern, SparseMatrix
from diffnet.ops.common.checks import check_lengths, not_a_tensor


class Connectivity:
    """The faces of packed meshes, and all that follows from them alone. It serves any number of positions.

    Args:
        faces: (F, 3) integers, packed vertex indices of the triangles. Operators are on their device.
        vertices: V
        lengths: the number of vertices of each mesh; None for one mesh

    Attributes:
        faces: (F, 3) int64
        lengths: as given
        pattern: (V, V), the pattern of the Laplacian and the gradient: each vertex and its neighbors along edges

    Raises TypeError for arguments of other types, and ValueError for other shapes, vertices that don't exist, a face
    that joins two meshes, and faces none of which has three distinct corners.
    """

    def __init__(self, faces: Tensor, vertices: int, lengths: Sequence[int] | None = None) -> None:
        if not isinstance(faces, Tensor):
            raise not_a_tensor("faces", faces)
        if faces.ndim != 2 or faces.shape[1] != 3:
            raise ValueError(f"faces should have shape (F, 3), shape is {tuple(faces.shape)}")
        if faces.is_floating_point() or faces.is_complex() or faces.dtype == torch.bool:
            raise TypeError(f"faces should be integers, got {faces.dtype}")
        self.lengths = tuple(check_lengths(lengths, "vertices", vertices))
        self.faces = faces = faces.long()
        if len(faces) and not 0 <= int(faces.min()) <= int(faces.max()) < vertices:
            raise ValueError(f"faces should be from 0 to {vertices - 1}, got {int(faces.min())} to {int(faces.max())}")
        device = faces.device
        sizes = torch.tensor(self.lengths, device=device)
        self.ptr = F.pad(sizes.cumsum(0), (1, 0))
        self.mesh = torch.arange(len(sizes), device=device).repeat_interleave(sizes)  # of each vertex
        of_faces = self.mesh[faces]
        if (of_faces != of_faces[:, :1]).any():
            raise ValueError("a face joins vertices of two meshes")
        self.face_ptr = F.pad(of_faces[:, 0].bincount(minlength=len(sizes)).cumsum(0), (1, 0))

        a, b, c = faces.unbind(1)
        self.usable = faces[(a != b) & (b != c) & (c != a)]  # the others have no geometry
        if len(self.usable) == 0:
            raise ValueError(f"none of the {len(faces)} faces has three distinct corners")
        tail, head = self.usable.reshape(-1), self.usable.roll(-1, 1).reshape(-1)
        own = torch.arange(vertices, device=device)
        keys = torch.cat([tail * vertices + head, head * vertices + tail, own * (vertices + 1)])
        entries, places = torch.unique(keys, return_inverse=True)
        self.rows, self.columns = entries // vertices, entries % vertices
        self.entries_of_rows = self.rows.bincount(minlength=vertices)
        self.pattern = Pattern.from_row_lengths(self.entries_of_rows, self.columns, vertices, check=False)
        self.by_vertex = Groups(tail, vertices)  # corners of faces
        self.by_entry = Groups(places[: 2 * len(tail)], len(entries))  # edges of faces, in both directions
        self.used = self.by_vertex.lengths > 0


class Groups:
    """Rows that belong to groups."""

    def __init__(self, groups: Tensor, count: int) -> None:
        self.order = groups.argsort(stable=True)
        self.lengths = groups.bincount(minlength=count)

    def sums(self, rows: Tensor) -> Tensor:
        """The sum of each group, added in a fixed order."""
        return _sums(rows[self.order], self.lengths)

    def maxima(self, rows: Tensor) -> Tensor:
        """The maximum of each group, 0 for an empty one."""
        return _maxima(rows[self.order], self.lengths)


def assemble(verts: Tensor, connectivity: Connectivity) -> Operators:
    """Operators without eigenpairs, whose values are differentiable functions of the positions of the vertices.

    A network can move vertices and feel the metric: `mass`, `frames` and the values of `laplacian` and `gradient` pass
    gradients on to the positions. `implicit_diffusion` and `DiffusionNet(diffusion="implicit")` take the result.

    verts: (V, 3) floating point, on the device of the connectivity

    The Laplacian is the cotangent Laplacian of the faces as they are. Values are those of `precompute(…,
    laplacian="cotan", k=0)`, computed in float64 and returned in the dtype of the positions. Where a definition
    has cases, such as the coordinate axis from which a tangent frame starts, gradients are those of the case at hand.
    Faces and vertices without area have no gradient.

    Raises TypeError if the positions are not floating point, ValueError for another shape or device.

    >>> verts = torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 1, 0]], requires_grad=True)
    >>> operators = assemble(verts, Connectivity(torch.tensor([[0, 1, 2]]), 3))
    >>> operators.mass.sum().backward()
    >>> verts.grad[1]  # moving the second corner to the right enlarges the triangle
    tensor([0.5000, 0.0000, 0.0000])
    """
    c = connectivity
    if not isinstance(verts, Tensor):
        raise not_a_tensor("verts", verts)
    if not verts.is_floating_point():
        raise TypeError(f"verts should be floating point, got {verts.dtype}")
    if verts.shape != (sum(c.lengths), 3):
        raise ValueError(f"verts should have shape {(sum(c.lengths), 3)}, shape is {tuple(verts.shape)}")
    if verts.device != c.faces.device:
        devices = f"{verts.device} and {c.faces.device}"
        raise ValueError(f"verts and the connectivity should be on one device, they are on {devices}")
    positions = verts.double()
    corners = F.embedding(c.usable, positions)  # its backward adds up in a fixed order
    edges = corners.roll(-1, 1) - corners
    normals = torch.linalg.cross(edges[:, 0], edges[:, 1])  # as long as twice the area
    doubled = _length(normals)
    frames = _frames(c, normals, doubled)
    exact = _mass(c, doubled), _laplacian(c, positions, edges, doubled), _gradient(c, positions, frames), frames
    mass, laplacian, gradient, frames = (values.to(verts.dtype) for values in exact)
    return Operators(
        ptr=c.ptr,
        mass=mass,
        evals=mass.new_zeros(len(c.lengths), 0),
        evecs=mass.new_zeros(len(mass), 0),
        laplacian=SparseMatrix(c.pattern, laplacian),
        gradient=SparseMatrix(c.pattern, gradient),
        frames=frames,
        faces=c.faces,
        face_ptr=c.face_ptr,
    )


def _mass(c: Connectivity, doubled: Tensor) -> Tensor:
    """A third of the area of the faces around each vertex, and a little for a vertex whose faces have no area."""
    mass = c.by_vertex.sums((doubled / 6).repeat_interleave(3))
    used = _sums(c.used.double(), c.ptr.diff())
    mean = _sums(mass.detach(), c.ptr.diff()) / used.clamp(min=1)
    return torch.where(c.used, mass.maximum(MIN_MASS * mean[c.mesh]), 0)


def _laplacian(c: Connectivity, positions: Tensor, edges: Tensor, doubled: Tensor) -> Tensor:
    """The entries of the cotangent Laplacian."""
    # The edge from corner i to the next is opposite to corner i + 2, between the edges i + 1 and i + 2.
    dots = -(edges.roll(-1, 1) * edges.roll(-2, 1)).sum(-1)
    floor = ADDED_CROSS * _radius(c, positions.detach()) ** 2
    weights = dots / (doubled + floor[c.mesh[c.usable[:, 0]]])[:, None] / 2
    joined = -c.by_entry.sums(weights.reshape(-1).repeat(2))
    return torch.where(c.rows == c.columns, -_sums(joined, c.entries_of_rows)[c.rows], joined)


def _radius(c: Connectivity, positions: Tensor) -> Tensor:
    """The largest distance of the vertices of each mesh from their mean. Vertices without faces don't count."""
    used, lengths = c.used[:, None], c.ptr.diff()
    count = _sums(c.used.double(), lengths).clamp(min=1)
    center = _sums(torch.where(used, positions, 0), lengths) / count[:, None]
    distance = torch.where(used, positions - center[c.mesh], 0).norm(dim=1)
    return _maxima(distance, lengths)


def _frames(c: Connectivity, normals: Tensor, doubled: Tensor) -> Tensor:
    """Tangent frames (V, 3, 3), see `tangent_frames`."""
    total = c.by_vertex.sums(normals.repeat_interleave(3, 0))
    area = doubled.detach().repeat_interleave(3)
    cancelled = total.detach().norm(dim=1) < MIN_NORMAL * c.by_vertex.sums(area)
    # The largest face of each vertex, by its place in the order of the areas.
    order = doubled.detach().argsort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    largest = order[c.by_vertex.maxima(place.double().repeat_interleave(3)).long()]
    total = torch.where(cancelled[:, None], F.embedding(largest, normals), total)
    size = _length(total)[:, None]
    upward = total.new_tensor([0.0, 0.0, 1.0])
    normal = torch.where(size > 0, total / torch.where(size > 0, size, 1), upward)
    # The coordinate axis farthest from the normal, the first of equals.
    x, y, z = normal.detach().abs().unbind(1)
    farthest = torch.where((x <= y) & (x <= z), 0, torch.where(y <= z, 1, 2))
    axis = torch.eye(3, dtype=total.dtype, device=total.device)[farthest]
    tangent = axis - (axis * normal).sum(1, keepdim=True) * normal
    tangent = tangent / tangent.norm(dim=1, keepdim=True)
    return torch.stack([tangent, torch.linalg.cross(normal, tangent), normal], 1)


def _gradient(c: Connectivity, positions: Tensor, frames: Tensor) -> Tensor:
    """Values (2, nnz) of the gradient, see `gradient_values`."""
    ends = F.embedding(torch.stack([c.rows, c.columns]), positions)
    tangents = F.embedding(c.rows, frames[:, :2].flatten(1)).view(-1, 2, 3)
    x, y = (tangents * (ends[1] - ends[0])[:, None]).sum(-1).unbind(1)
    xx, xy, yy = _sums(torch.stack([x * x, x * y, y * y], 1), c.entries_of_rows).unbind(1)
    # The eigenvalues of the normal equations are mean ± radius.
    mean, radius = (xx + yy) / 2, _length(torch.stack([(xx - yy) / 2, xy], 1))
    low, high = mean - radius, mean + radius
    # Where edges hardly extend in one direction, raise its eigenvalue to MIN_SPREAD times the other:
    # N + (MIN_SPREAD · high − low) (high · I − N) / (high − low)
    raised = low.detach() < MIN_SPREAD * high.detach()
    share = torch.where(raised, (MIN_SPREAD * high - low) / torch.where(raised & (radius > 0), 2 * radius, 1), 0)
    xx, xy, yy = xx + share * (high - xx), (1 - share) * xy, yy + share * (high - yy)
    determinant = xx * yy - xy * xy
    has_edges = high.detach() > 0
    inverse = torch.stack([yy, -xy, xx], 1) / torch.where(has_edges, determinant, 1)[:, None]
    solve = F.embedding(c.rows, torch.where(has_edges[:, None], inverse, 0))
    values = torch.stack([solve[:, 0] * x + solve[:, 1] * y, solve[:, 1] * x + solve[:, 2] * y], 1)
    sums = F.embedding(c.rows, _sums(values, c.entries_of_rows))
    return torch.where((c.rows == c.columns)[:, None], values - sums, values).T.contiguous()


def _sums(rows: Tensor, lengths: Tensor) -> Tensor:
    """Sums of consecutive rows, added in a fixed order."""
    return torch.segment_reduce(rows, "sum", lengths=lengths, axis=0, initial=0, unsafe=True)


def _maxima(rows: Tensor, lengths: Tensor) -> Tensor:
    """Maxima of consecutive rows, 0 for none."""
    return torch.segment_reduce(rows, "max", lengths=lengths, axis=0, initial=0, unsafe=True)


def _length(vectors: Tensor) -> Tensor:
    """The length of each vector. A vector 0 has gradient 0, where that of `norm` is not a number."""
    squared = (vectors * vectors).sum(-1)
    return torch.where(squared > 0, squared.clamp(min=torch.finfo(squared.dtype).tiny).sqrt(), 0)
