"""Operators as differentiable functions of the positions of the vertices."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from diffnet.geometry.discretize.connectivity import Connectivity, matrix_pattern
from diffnet.geometry.discretize.packed import (
    Triangles,
    cotan_laplacian,
    frames,
    gradient,
    raised_mass,
    thirds_of_areas,
    triangles,
)
from diffnet.geometry.discretize.packed_delaunay import packed_delaunay_laplacian
from diffnet.geometry.errors import OptionError
from diffnet.geometry.operators import Operators
from diffnet.geometry.options import LAPLACIANS, LaplacianKind
from diffnet.ops import Pattern, SparseMatrix
from diffnet.ops.common.checks import not_a_tensor


def assemble(verts: Tensor, connectivity: Connectivity, laplacian: LaplacianKind = "cotan") -> Operators:
    """Operators without eigenpairs, whose values are differentiable functions of the positions of the vertices.

    A network can move vertices and feel the metric: `mass`, `frames` and the values of `laplacian` and `gradient` pass
    gradients on to the positions. `implicit_diffusion` and `DiffusionNet(diffusion="implicit")` take the result.

    verts: (V, 3) floating point, on the device of the connectivity
    laplacian: "cotan", the cotangent Laplacian of the faces as they are, or "robust", that of the intrinsic Delaunay
        triangulation, whose edges are flipped at each call; which ones has no gradient

    Values are those of `precompute(…, laplacian=laplacian, k=0)`, computed in float64 and returned in the dtype of the
    positions. Where a definition has cases, such as the coordinate axis from which a tangent frame starts, gradients
    are those of the case at hand. Faces and vertices without area have no gradient.

    Raises TypeError if the positions are not floating point, ValueError for another shape or device, and OptionError
    for an unknown Laplacian.

    >>> import torch
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
    if laplacian not in LAPLACIANS:
        raise OptionError(f"laplacian should be one of {', '.join(LAPLACIANS)}, got {laplacian!r}")
    return packed_parts(c, verts.double(), laplacian).operators(verts.dtype)


class PackedParts(NamedTuple):
    """What operators without eigenpairs are made of, float64.

    positions: (V, 3)
    columns: of the Laplacian, (nnz,) int64
    unclear: (B,) bool, see `DelaunayLaplacian`
    """

    c: Connectivity
    positions: Tensor
    shapes: Triangles
    mass: Tensor
    pattern: Pattern
    columns: Tensor
    laplacian: Tensor
    gradient: Tensor
    frames: Tensor
    unclear: Tensor

    def operators(self, dtype: torch.dtype) -> Operators:
        """The operators in a dtype."""
        mass = self.mass.to(dtype)
        return Operators(
            ptr=self.c.ptr,
            mass=mass,
            evals=mass.new_zeros(len(self.c.lengths), 0),
            evecs=mass.new_zeros(len(mass), 0),
            laplacian=SparseMatrix(self.pattern, self.laplacian.to(dtype)),
            gradient=SparseMatrix(self.c.pattern, self.gradient.to(dtype)),
            frames=self.frames.to(dtype),
            faces=self.c.faces,
            face_ptr=self.c.face_ptr,
        )


def packed_parts(c: Connectivity, positions: Tensor, laplacian: LaplacianKind) -> PackedParts:
    """The parts of operators, as differentiable functions of the positions (V, 3) float64."""
    shapes = triangles(c, positions)
    axes = frames(c, shapes.normals)
    if laplacian == "robust":
        rows, columns, values, areas, unclear = packed_delaunay_laplacian(c, positions)
        pattern = matrix_pattern(rows, columns, len(positions))
    else:
        pattern, columns, areas = c.pattern, c.columns, thirds_of_areas(c, shapes.doubled)
        values = cotan_laplacian(c, positions, shapes.edges, shapes.doubled)
        unclear = torch.zeros(len(c.lengths), dtype=torch.bool, device=positions.device)
    slopes = gradient(c, positions, axes)
    return PackedParts(c, positions, shapes, raised_mass(c, areas), pattern, columns, values, slopes, axes, unclear)
