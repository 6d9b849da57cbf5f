"""Operators of packed meshes in PyTorch, on one device: as differentiable functions of positions, or for a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import scipy.sparse
import torch
from torch import Tensor
from torch.nn import functional as F

from diffnet.geometry.discretize.connectivity import Connectivity, matrix_pattern, sums
from diffnet.geometry.discretize.gradient import MAX_GAP, order_along_surface
from diffnet.geometry.discretize.packed import (
    Triangles,
    cotan_laplacian,
    dot,
    frames,
    gradient,
    radius,
    raised_mass,
    triangles,
)
from diffnet.geometry.discretize.packed_delaunay import packed_delaunay_laplacian
from diffnet.geometry.eigen.gpu.lanczos import PackedProblem
from diffnet.geometry.errors import OptionError
from diffnet.geometry.mesh.mesh import Mesh
from diffnet.geometry.operators import Operators
from diffnet.geometry.options import LAPLACIANS, LaplacianKind, Options, chosen_laplacian
from diffnet.geometry.preprocessing.recipe import optional_arrays
from diffnet.geometry.store.codec import Arrays
from diffnet.geometry.store.transfer import to_host
from diffnet.ops import SparseMatrix
from diffnet.ops.common.checks import check_tensor


def assemble(verts: Tensor, connectivity: Connectivity, laplacian: LaplacianKind = "cotan") -> Operators:
    """Operators without eigenpairs, whose values are differentiable functions of the positions of the vertices.

    A network can move vertices and feel the metric: `mass`, `frames` and the values of `laplacian` and `gradient` pass
    gradients on to the positions. `implicit_diffusion` and `DiffusionNet(diffusion="implicit")` take the result.

    verts: (V, 3) floating point, on the device of the connectivity
    laplacian: "cotan", the cotangent Laplacian of the faces as they are, or "robust", that of the intrinsic Delaunay
        triangulation, whose edges are flipped at each call; which ones has no gradient

    Values are those of `precompute(…, laplacian=laplacian, k=0)`, computed in float64 and returned in the dtype of the
    positions. The connectivity says which normals are turned. Where a definition has cases, such as the coordinate axis
    from which a tangent frame starts, gradients are those of the case at hand. Faces and vertices without area have no
    gradient.

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
    check_tensor("verts", verts, (sum(c.lengths), 3))
    if verts.device != c.faces.device:
        devices = f"{verts.device} and {c.faces.device}"
        raise ValueError(f"verts and the connectivity should be on one device, they are on {devices}")
    if laplacian not in LAPLACIANS:
        raise OptionError(f"laplacian should be one of {', '.join(LAPLACIANS)}, got {laplacian!r}")
    return packed_parts(c, verts.double(), laplacian, verts.dtype).operators


class PackedParts(NamedTuple):
    """Operators without eigenpairs, and what is needed of them in float64.

    rows, columns: of the Laplacian, (nnz,) int64
    unclear: (B,) bool, see `DelaunayLaplacian`
    """

    operators: Operators
    shapes: Triangles
    mass: Tensor
    rows: Tensor
    columns: Tensor
    laplacian: Tensor
    unclear: Tensor


def packed_parts(c: Connectivity, positions: Tensor, laplacian: LaplacianKind, dtype: torch.dtype) -> PackedParts:
    """Operators in a dtype and their parts, as differentiable functions of the positions (V, 3) float64."""
    shapes = triangles(c, positions)
    axes = frames(c, shapes.normals)
    if laplacian == "robust":
        rows, columns, values, areas, unclear = packed_delaunay_laplacian(c, positions)
        pattern = matrix_pattern(rows, columns, len(positions))
    else:
        pattern, rows, columns = c.pattern, c.rows, c.columns
        areas = c.by_vertex.sums((shapes.doubled / 6).repeat_interleave(3))  # a third of that of each face
        values = cotan_laplacian(c, positions, shapes.edges, shapes.doubled)
        unclear = torch.zeros(len(c.lengths), dtype=torch.bool, device=positions.device)
    mass = raised_mass(c, areas)
    rounded = mass.to(dtype)
    operators = Operators(
        ptr=c.ptr,
        mass=rounded,
        evals=rounded.new_zeros(len(c.lengths), 0),
        evecs=rounded.new_zeros(len(mass), 0),
        laplacian=SparseMatrix(pattern, values.to(dtype)),
        gradient=SparseMatrix(c.pattern, gradient(c, positions, axes).to(dtype)),
        frames=axes.to(dtype),
        faces=c.faces,
        face_ptr=c.face_ptr,
    )
    return PackedParts(operators, shapes, mass, rows, columns, values, unclear)


class Discretized(NamedTuple):
    """The operators of packed meshes without their eigenpairs, on one device.

    places: those of the meshes in the list of `discretize_on`
    operators: in float32, with k = 0
    problem: in float64, for the eigensolver
    """

    places: list[int]
    operators: Operators
    problem: PackedProblem


def discretize_on(device: torch.device | str, meshes: Sequence[Mesh], options: Options) -> Discretized | None:
    """Laplacian, mass, frames and gradient of many meshes at once, as `discretize` computes them one by one.

    meshes: see `mesh_for_operators`. None if all of them are left.

    Values differ from those of `discretize` by rounding. They have the same bits in every run, whatever other meshes
    are in the list. Entries of the Laplacian that are exactly 0 are kept.

    These meshes are left to `discretize`: point clouds, meshes with given normals, all meshes for the original's
    operators, meshes some of whose vertices may have to be joined, meshes whose robust Laplacian is unclear, see
    `DelaunayLaplacian`, and meshes that can't be used, for which it raises an error.
    """
    can = options.operators == "diffnet"
    places = [i for i, mesh in enumerate(meshes) if can and not mesh.is_point_cloud and mesh.normals is None]
    # Few meshes are refused. The others are computed again without them, which changes no bit of their values.
    while places:
        positions, c = packed_surfaces(device, [meshes[i] for i in places])
        refused = set[int]() if options.join == "never" else _may_be_joined(c, positions, options.join == "always")
        if not refused:
            laplacian = chosen_laplacian(options.laplacian, options.operators)
            parts = packed_parts(c, positions, laplacian, torch.float32)
            refused = _refused(c, positions, parts)
            if not refused:
                entries = parts.rows, parts.columns, parts.laplacian
                problem = PackedProblem(c.lengths, *entries, parts.mass, positions)
                return Discretized(places, _along_surface(parts.operators, c), problem)
        places = [i for number, i in enumerate(places) if number not in refused]
    return None


def packed_surfaces(device: torch.device | str, meshes: Sequence[Mesh]) -> tuple[Tensor, Connectivity]:
    """The positions of packed meshes, (V, 3) float64, and their connectivity."""
    lengths = [len(mesh.verts) for mesh in meshes]
    # Positions are rounded to float32 already, and indices of 32 bits are enough: half of the bytes to copy.
    pinned = torch.device(device).type == "cuda"
    verts = torch.empty((sum(lengths), 3), dtype=torch.float32, pin_memory=pinned)
    faces = torch.empty((sum(len(mesh.faces) for mesh in meshes), 3), dtype=torch.int32, pin_memory=pinned)
    v = f = 0
    for mesh in meshes:
        end_v, end_f = v + len(mesh.verts), f + len(mesh.faces)
        verts.numpy()[v:end_v] = mesh.verts
        np.add(mesh.faces, v, out=faces.numpy()[f:end_f], casting="unsafe")
        v, f = end_v, end_f
    positions = verts.to(device, non_blocking=True).double()
    turned = np.concatenate([mesh.turned_faces for mesh in meshes])
    turned_faces = torch.from_numpy(turned).to(device) if turned.any() else None
    of_faces = faces.to(device, non_blocking=True)
    return positions, Connectivity(of_faces, v, lengths, check=False, turned_faces=turned_faces)


def _may_be_joined(c: Connectivity, positions: Tensor, always: bool) -> set[int]:
    """The meshes with vertices at one position that `joined_vertices` may join, and perhaps a few more."""
    candidates = c.used
    if not always:
        is_open = (c.by_entry.lengths == 1) & (c.rows != c.columns)
        candidates = sums(is_open.double(), c.entries_of_rows) > 0
    # Vertices at one position have equal sums. Those of one mesh follow each other, because the sort is stable.
    x, y, z = positions.unbind(1)
    ordered, order = torch.where(candidates, x + np.e * y + np.pi * z, torch.nan).sort(stable=True)
    mesh = c.mesh[order]
    equal = (ordered[1:] == ordered[:-1]) & (mesh[1:] == mesh[:-1])
    return set(mesh[1:][equal].tolist())


def _refused(c: Connectivity, positions: Tensor, parts: PackedParts) -> set[int]:
    """The meshes with an unclear result, and those for which `discretize` raises an error."""
    operators, shapes = parts.operators, parts.shapes
    longest = torch.stack([dot(edges, edges) for edges in (shapes.edges[:, 0], shapes.edges[:, 2])]).amax(0)
    of_faces = torch.stack([shapes.doubled, longest], 1)
    of_corners = F.pad(of_faces[:, None], (0, 0, 0, 2)).view(-1, 2)  # counts each face at its first corner
    area, squares = c.per_mesh.sums(c.by_vertex.sums(of_corners)).unbind(1)
    infinite = [
        ~operators.mass.isfinite(),
        sums((~operators.laplacian.values.isfinite()).double(), operators.laplacian.pattern.indptr.long().diff()),
        sums((~operators.gradient.values.isfinite()).any(0).double(), c.entries_of_rows),
        (~operators.frames.isfinite()).flatten(1).any(1),
    ]
    totals = c.per_mesh.sums(torch.stack([x.double() for x in (c.used, parts.mass, *infinite)], 1))
    usable = (totals[:, :2] > 0).all(1) & (totals[:, 2:] == 0).all(1) & (radius(c, positions) > 0)
    usable &= (area > 1e-6 * squares) & ~parts.unclear
    return {number for number, is_usable in enumerate(usable.tolist()) if not is_usable}


def _along_surface(operators: Operators, c: Connectivity) -> Operators:
    """The operators with rows stored along the surface, in the meshes in which neighbors have distant numbers.

    See `order_unless_near`. The orders of these meshes are found on the host.
    """
    if max(c.lengths) <= MAX_GAP:
        return operators
    gaps = torch.stack([(c.rows - c.columns).abs(), torch.ones_like(c.rows)], 1).double()
    gap, count = c.per_mesh.sums(sums(gaps, c.entries_of_rows)).unbind(1)
    far = (gap >= MAX_GAP * count).nonzero().squeeze(1).tolist()
    if not far:
        return operators
    order = torch.arange(len(c.mesh))
    starts = np.cumsum([0, *c.lengths])
    for mesh in far:
        first, end = starts[mesh], starts[mesh + 1]
        indptr = c.pattern.indptr[first : end + 1].cpu().numpy()
        indices = c.pattern.indices[indptr[0] : indptr[-1]].cpu().numpy() - first
        graph = scipy.sparse.csr_matrix(
            (np.ones(len(indices)), indices, indptr - indptr[0]), (end - first, end - first)
        )
        order[first:end] = torch.from_numpy(first + order_along_surface(graph))
    order = order.to(c.rows.device)
    laplacian, edges = (m.with_row_order(order, check=False) for m in (operators.laplacian, operators.gradient))
    return replace(operators, laplacian=laplacian, gradient=edges)


def entry_arrays(operators: Operators) -> list[Arrays]:
    """For each mesh, all arrays of a cache entry except the eigenpairs, see `operator_arrays`.

    They are views of one copy of the operators on the host.
    """
    o = operators
    order = o.gradient.pattern.row_order
    tensors = {"ptr": o.ptr, "mass": o.mass, "frames": o.frames}
    tensors |= {} if order is None else {"row_order": (order - _repeated(o.ptr[:-1], o.ptr)).int()}
    for which, matrix in (("laplacian", o.laplacian), ("gradient", o.gradient)):
        starts = matrix.pattern.stored_indptr[o.ptr].long()
        local = matrix.pattern.stored_indices - _repeated(o.ptr[:-1], starts)
        tensors |= {f"{which}_indptr": matrix.pattern.stored_indptr.int(), f"{which}_indices": local.int()}
        tensors |= {which: matrix.values, f"{which}_starts": starts}
    host = to_host(tensors)
    return [_of_mesh(host, i, first, end) for i, (first, end) in enumerate(pairwise(host["ptr"].tolist()))]


def _of_mesh(host: Arrays, mesh: int, first: int, end: int) -> Arrays:
    """The arrays of the mesh that owns the vertices first:end."""
    arrays = optional_arrays() | {"mass": host["mass"][first:end], "frames": host["frames"][first:end]}
    for which in ("laplacian", "gradient"):
        begin, stop = host[f"{which}_starts"][mesh : mesh + 2]
        arrays[which] = host[which][..., begin:stop]
        arrays[f"{which}_indptr"] = host[f"{which}_indptr"][first : end + 1] - np.int32(begin)
        arrays[f"{which}_indices"] = host[f"{which}_indices"][begin:stop]
    order = host.get("row_order", np.zeros(0, np.int32))[first:end]
    is_mesh_order = np.array_equal(order, np.arange(len(order)))
    return arrays | {"row_order": order[:0] if is_mesh_order else order}


def _repeated(values: Tensor, starts: Tensor) -> Tensor:
    """The value of each extent, repeated for each of its rows. starts: where the extents begin, and the end"""
    return values.repeat_interleave(starts.diff())
