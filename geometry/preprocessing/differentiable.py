"""Operators as differentiable functions of the positions of the vertices."""

from __future__ import annotations

from torch import Tensor

from diffnet.geometry.discretize.connectivity import Connectivity, matrix_pattern
from diffnet.geometry.discretize.packed import (
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
from diffnet.geometry.preprocessing.options import LAPLACIANS, LaplacianKind
from diffnet.ops import SparseMatrix
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
    positions = verts.double()
    edges, normals, doubled = triangles(c, positions)
    axes = frames(c, normals)
    if laplacian == "robust":
        found = packed_delaunay_laplacian(c, positions)
        pattern, weights, areas = matrix_pattern(found.rows, found.columns, len(verts)), found.values, found.areas
    else:
        pattern, areas = c.pattern, thirds_of_areas(c, doubled)
        weights = cotan_laplacian(c, positions, edges, doubled)
    exact = raised_mass(c, areas), weights, gradient(c, positions, axes), axes
    mass, weights, slopes, axes = (result.to(verts.dtype) for result in exact)
    return Operators(
        ptr=c.ptr,
        mass=mass,
        evals=mass.new_zeros(len(c.lengths), 0),
        evecs=mass.new_zeros(len(mass), 0),
        laplacian=SparseMatrix(pattern, weights),
        gradient=SparseMatrix(c.pattern, slopes),
        frames=axes,
        faces=c.faces,
        face_ptr=c.face_ptr,
    )
