"""`Operators`, the result of preprocessing and the input of networks: a packed ragged batch of meshes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from diffnet.geometry.mesh.mesh import mesh_edges
from diffnet.ops import (
    Pattern,
    SparseMatrix,
    block_diagonal,
    block_diagonal_pattern,
    row_offsets,
    split_diagonal,
    split_diagonal_pattern,
    spmm,
)
from diffnet.ops.common.checks import check_count
from diffnet.ops.common.compiler import not_compiled
from diffnet.ops.common.memo import memoized


@dataclass(frozen=True, eq=False)
class Operators:
    """Discrete operators of a batch of B meshes packed as one larger, disconnected mesh of V vertices.

    It is a container of meshes: `len(operators)` is B, `operators[i]` is one mesh, `operators[i:j]` is a packed batch,
    and a loop runs over the meshes.

    ptr: (B+1,) int64; mesh b owns the vertices ptr[b]:ptr[b+1]
    mass: (V,) lumped vertex areas; 0 at vertices that no face uses
    evals: (B, K), ascending, and evecs: (V, K): eigenpairs L φ = λ M φ with ΦᵀMΦ = I for each mesh. If a mesh has fewer
        than K pairs, the missing vectors are 0 and the missing values repeat the last one.
    laplacian: (V, V), positive semi-definite, block-diagonal over the meshes
    gradient: (V, V), with two sets of values (2, nnz) on one pattern: the X and Y components in the tangent frame
    frames: (V, 3, 3); the rows are tangent x, tangent y and normal
    faces: (F, 3) int64, packed vertex indices, and face_ptr: (B+1,) int64; F = 0 for point clouds
    gradient_evecs: (2, V, K) or None; the gradients of the eigenvectors, [G_X Φ, G_Y Φ]
    neighborhood: (V, V) or None; row i holds the vertices that vertex i attends to, see `with_k_ring` and
        `with_nearest`. None means the pattern of the gradient: the vertices joined to i by an edge, and i itself.
    joined: (V,) int64 or None; the first of the vertices at its position that a vertex is joined with, its own number
        if there is none. None means that no vertices are joined; see `precompute`. Joined vertices share their mass
        equally and have equal rows in `evecs`, `frames` and `gradient`. The gradient reads functions at the first ones.

    >>> from diffnet.geometry import precompute
    >>> triangle = precompute(([[0, 0, 0], [1, 0, 0], [0, 1, 0]], [[0, 1, 2]]), k=2)
    >>> collate([triangle, triangle, triangle])[1:]
    Operators(meshes=2, vertices=6, faces=2, k=2, dtype=torch.float32, device=cpu)
    """

    ptr: Tensor
    mass: Tensor
    evals: Tensor
    evecs: Tensor
    laplacian: SparseMatrix
    gradient: SparseMatrix
    frames: Tensor
    faces: Tensor
    face_ptr: Tensor
    gradient_evecs: Tensor | None = None
    neighborhood: Pattern | None = None
    joined: Tensor | None = None
    # Caches of `lengths` and `edges`, see `memoized`.
    _lengths: tuple[int, ...] | None = None
    _edges: Tensor | None = None

    def __repr__(self) -> str:
        return (
            f"Operators(meshes={len(self)}, vertices={self.num_vertices}, faces={self.faces.shape[0]}, k={self.k}, "
            f"dtype={self.mass.dtype}, device={self.device})"
        )

    def __len__(self) -> int:
        """The number of meshes."""
        return len(self.ptr) - 1

    def __getitem__(self, index: int | slice) -> Operators:
        """The operators of one mesh, or of several, packed.

        Negative numbers count from the end. Raises IndexError for a number out of range, TypeError for other indices.
        To loop over all meshes, use `for mesh in operators` or `split`, which split once.
        """
        meshes = len(self)
        if isinstance(index, slice):
            numbers = range(meshes)[index]
            if numbers.step == 1 or len(numbers) == 0:
                return self._consecutive(numbers.start, len(numbers))
            each = self.split()
            return collate([each[i] for i in numbers])
        number = check_count("the number of a mesh", index, -sys.maxsize)
        if not -meshes <= number < meshes:
            raise IndexError(f"the batch has {meshes} meshes, there is no mesh {number}")
        return self._consecutive(number % meshes, 1)

    def _consecutive(self, first: int, count: int) -> Operators:
        rest = len(self) - first - count
        return self if first == rest == 0 else self._groups([first, count, rest])[1]

    def __iter__(self) -> Iterator[Operators]:
        return iter(self.split())

    @property
    def num_vertices(self) -> int:
        return len(self.mass)

    @property
    def k(self) -> int:
        """The number of eigenpairs."""
        return self.evecs.shape[1]

    @property
    def device(self) -> torch.device:
        return self.mass.device

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of vertices of each mesh. They are kept on the host, so reading them doesn't wait for a GPU."""
        return memoized(self, "_lengths", _find_lengths)

    @property
    def edges(self) -> Tensor:
        """(E, 2) int64, the undirected edges of the faces in the order of `mesh_edges`, mesh after mesh."""
        return memoized(self, "_edges", lambda operators: _find_edges(operators.faces))

    def with_gradient_evecs(self) -> Operators:
        """These operators with `gradient_evecs`, so that gradients can be computed in the eigenbasis."""
        if self.gradient_evecs is not None:
            return self
        gradient_evecs = spmm(self.gradient.pattern, self.gradient.values, self.evecs)
        return replace(self, gradient_evecs=gradient_evecs.to(self.evecs.dtype))

    def with_basis_dtype(self, dtype: torch.dtype) -> Operators:
        """These operators with `evecs` and `gradient_evecs` in another dtype. Other fields keep theirs.

        Under autocast, matrix products round their inputs. Rounding the basis once saves this step in every block.
        """
        if self.evecs.dtype == dtype:
            return self
        gradient_evecs = None if self.gradient_evecs is None else self.gradient_evecs.to(dtype)
        return replace(self, evecs=self.evecs.to(dtype), gradient_evecs=gradient_evecs)

    def prepared(self, dtype: torch.dtype) -> Operators:
        return self.with_gradient_evecs().with_basis_dtype(dtype)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Operators:
        """Move to a device and convert the real-valued fields to a dtype. Returns self if nothing changes."""

        def move(x: Tensor) -> Tensor:
            return x.to(device=device, dtype=dtype if x.is_floating_point() else None)

        real = (self.mass, self.evals, self.evecs, self.frames, self.laplacian.values, self.gradient.values)
        if all(move(x) is x for x in real):
            return self
        return self._moved(move, lambda matrix: matrix.to(device, dtype), lambda pattern: pattern.to(device))

    def cuda(self, device: torch.device | int | None = None) -> Operators:
        """Move to a GPU, by default the current one."""
        return self.to(torch.device("cuda", device) if isinstance(device, int) else device or "cuda")

    def cpu(self) -> Operators:
        """Move to the CPU."""
        return self.to("cpu")

    def pin_memory(self) -> Operators:
        """Copy to pinned memory, from which a GPU copies faster. A `DataLoader` with `pin_memory=True` calls this.

        Raises RuntimeError if PyTorch finds no GPU.
        """
        return self._moved(Tensor.pin_memory, SparseMatrix.pin_memory, Pattern.pin_memory)

    def _moved(
        self,
        move: Callable[[Tensor], Tensor],
        move_matrix: Callable[[SparseMatrix], SparseMatrix],
        move_pattern: Callable[[Pattern], Pattern],
    ) -> Operators:
        return Operators(
            ptr=move(self.ptr),
            mass=move(self.mass),
            evals=move(self.evals),
            evecs=move(self.evecs),
            laplacian=move_matrix(self.laplacian),
            gradient=move_matrix(self.gradient),
            frames=move(self.frames),
            faces=move(self.faces),
            face_ptr=move(self.face_ptr),
            gradient_evecs=None if self.gradient_evecs is None else move(self.gradient_evecs),
            neighborhood=None if self.neighborhood is None else move_pattern(self.neighborhood),
            joined=None if self.joined is None else move(self.joined),
            _lengths=self.lengths,
            _edges=None if self._edges is None else move(self._edges),
        )

    def split(self) -> list[Operators]:
        """The meshes of the batch as separate operators. The inverse of `collate`."""
        return [self] if len(self) == 1 else self._groups([1] * len(self))

    def _groups(self, counts: Sequence[int]) -> list[Operators]:
        """Split into batches of these numbers of consecutive meshes."""
        if self.ptr.is_meta:
            raise ValueError("operators on the meta device hold no extents; split them before .to('meta')")
        bounds = list(accumulate(counts, initial=0))
        lengths = [self.lengths[a:b] for a, b in pairwise(bounds)]
        sizes = [sum(each) for each in lengths]
        offsets = row_offsets(sizes)
        face_bounds = self.face_ptr[bounds].tolist()
        face_sizes = [b - a for a, b in pairwise(face_bounds)]
        laplacians = split_diagonal(self.laplacian, sizes)
        gradients = split_diagonal(self.gradient, sizes)
        mass, evecs, frames = (torch.split(x, sizes) for x in (self.mass, self.evecs, self.frames))
        faces = torch.split(self.faces, face_sizes)
        gradient_evecs = None if self.gradient_evecs is None else torch.split(self.gradient_evecs, sizes, dim=1)
        neighborhoods = None if self.neighborhood is None else split_diagonal_pattern(self.neighborhood, sizes)
        joined = None if self.joined is None else torch.split(self.joined, sizes)
        return [
            Operators(
                ptr=self.ptr[bounds[b] : bounds[b + 1] + 1] - offsets[b],
                mass=mass[b],
                evals=self.evals[bounds[b] : bounds[b + 1]],
                evecs=evecs[b],
                laplacian=laplacians[b],
                gradient=gradients[b],
                frames=frames[b],
                faces=faces[b] - offsets[b],
                face_ptr=self.face_ptr[bounds[b] : bounds[b + 1] + 1] - face_bounds[b],
                gradient_evecs=None if gradient_evecs is None else gradient_evecs[b],
                neighborhood=None if neighborhoods is None else neighborhoods[b][0],
                joined=None if joined is None else joined[b] - offsets[b],
                _lengths=lengths[b],
            )
            for b in range(len(counts))
        ]


def collate(batch: Sequence[Operators]) -> Operators:
    """Pack operators into one batch.

    All must have the same K, dtype and device; otherwise ValueError is raised. `gradient_evecs` is kept if all have it.
    Each mesh keeps its neighborhood.

    >>> from diffnet.geometry import precompute
    >>> triangle = precompute(([[0, 0, 0], [1, 0, 0], [0, 1, 0]], [[0, 1, 2]]), k=2)
    >>> batch = collate([triangle, triangle])
    >>> batch.ptr.tolist(), batch.faces.tolist()
    ([0, 3, 6], [[0, 1, 2], [3, 4, 5]])
    """
    if not batch:
        raise ValueError("collate needs at least one Operators, got an empty sequence")
    if len(batch) == 1:
        return batch[0]
    for what, values in (
        ("k", {str(o.k) for o in batch}),
        ("device", {str(o.device) for o in batch}),
        ("dtype", {str(o.mass.dtype) for o in batch}),
    ):
        if len(values) > 1:
            raise ValueError(f"operators with different {what} can't be packed: {', '.join(sorted(values))}")
    gradient_evecs = [o.gradient_evecs for o in batch if o.gradient_evecs is not None]
    neighborhoods = [o.gradient.pattern if o.neighborhood is None else o.neighborhood for o in batch]
    vertex_offsets = row_offsets([o.num_vertices for o in batch])
    face_offsets = row_offsets([len(o.faces) for o in batch])
    return Operators(
        ptr=torch.cat([batch[0].ptr[:1], *(o.ptr[1:] + n for o, n in zip(batch, vertex_offsets, strict=True))]),
        mass=torch.cat([o.mass for o in batch]),
        evals=torch.cat([o.evals for o in batch]),
        evecs=torch.cat([o.evecs for o in batch]),
        laplacian=block_diagonal([o.laplacian for o in batch]),
        gradient=block_diagonal([o.gradient for o in batch]),
        frames=torch.cat([o.frames for o in batch]),
        faces=torch.cat([o.faces + n for o, n in zip(batch, vertex_offsets, strict=True)]),
        face_ptr=torch.cat(
            [batch[0].face_ptr[:1], *(o.face_ptr[1:] + n for o, n in zip(batch, face_offsets, strict=True))]
        ),
        gradient_evecs=torch.cat(gradient_evecs, dim=1) if len(gradient_evecs) == len(batch) else None,
        neighborhood=None if all(o.neighborhood is None for o in batch) else block_diagonal_pattern(neighborhoods),
        joined=None if all(o.joined is None for o in batch) else _packed_joined(batch, vertex_offsets),
        _lengths=sum((o.lengths for o in batch), ()),
    )


def _packed_joined(batch: Sequence[Operators], vertex_offsets: Sequence[int]) -> Tensor:
    joined = [torch.arange(o.num_vertices, device=o.device) if o.joined is None else o.joined for o in batch]
    return torch.cat([x + n for x, n in zip(joined, vertex_offsets, strict=True)])


def _find_lengths(operators: Operators) -> tuple[int, ...]:
    if operators.ptr.is_meta:
        raise ValueError("operators on the meta device hold no extents; read .lengths before .to('meta')")
    return tuple(torch.diff(operators.ptr).tolist())


@not_compiled
def _find_edges(faces: Tensor) -> Tensor:
    if faces.is_meta:
        raise ValueError("operators on the meta device hold no faces to find edges of; read .edges before .to('meta')")
    return torch.from_numpy(mesh_edges(faces.cpu().numpy())).to(faces.device)
