"""Block Lanczos iteration for several operators at once, on a device: the inverses of L + σM of several problems.

It differs from `KrylovSpace` in that each block is orthogonalized against the whole basis, so no step depends on
numbers that the CPU would have to read. The CPU queues all steps at once, and works on small matrices only at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffnet.geometry.eigen.gpu.multifrontal import MultifrontalCholesky
from diffnet.geometry.eigen.lanczos import without_constant
from diffnet.geometry.eigen.problem import Array, Pairs, Problem
from diffnet.ops.common.backend import HAS_TRITON
from diffnet.ops.common.cuda_graph import replayed
from diffnet.ops.functional_maps import reference
from diffnet.ops.sparse.reference import csr_tensor

# Constants of the generator SplitMix64 (Steele et al. 2014), as signed numbers. PyTorch's generators draw other numbers
# on other devices, and NumPy's takes 4 ms for 32,000 vertices.
GOLDEN_RATIO = 0x9E3779B97F4A7C15 - 2**64
SPLITMIX = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
CHUNK = 1024  # rows of a scalar product that are added up at once; several chunks of a component fill the GPU
Map: TypeAlias = Callable[..., Iterator[Any]]  # `map`, or the `map` of a thread pool


class PackedProblem(NamedTuple):
    """The problems L φ = λ M φ of several meshes, one after another.

    lengths: the number of vertices of each mesh
    rows, columns: (E,) int64, the places of the entries of L, counted over all meshes; each once, in order of the rows
    values: (E,) float64
    mass: (V,) float64, at least 0
    positions: (V, 3) floating point, or None; where vertices are known, factors are smaller
    """

    lengths: tuple[int, ...]
    rows: Tensor
    columns: Tensor
    values: Tensor
    mass: Tensor
    positions: Tensor | None = None

    def restricted(self, vertices: Tensor, lengths: tuple[int, ...]) -> PackedProblem:
        """The problem on some vertices, given in their new order, with new lengths."""
        place = torch.full_like(self.mass, -1, dtype=torch.int64)
        place[vertices] = torch.arange(len(vertices), device=vertices.device)
        rows, columns = place[self.rows], place[self.columns]
        inside = ((rows >= 0) & (columns >= 0)).nonzero()[:, 0]
        rows, order = rows[inside].sort(stable=True)
        columns, values = columns[inside][order], self.values[inside][order]
        positions = None if self.positions is None else self.positions[vertices]
        return PackedProblem(lengths, rows, columns, values, self.mass[vertices], positions)

    def on_host(self) -> scipy.sparse.csr_matrix:
        """L as one SciPy matrix."""
        rows, columns, values = (t.cpu().numpy() for t in (self.rows, self.columns, self.values))
        return scipy.sparse.csr_matrix((values, (rows, columns)), (len(self.mass),) * 2)


def packed(problems: Sequence[Problem], device: torch.device) -> PackedProblem:
    """Problems with SciPy matrices, on a device."""
    lengths = tuple(len(mass) for _, mass in problems)
    matrix = scipy.sparse.block_diag([_without_repeats(laplacian) for laplacian, _ in problems], "coo")
    mass = np.concatenate([mass for _, mass in problems])
    arrays = matrix.row.astype(np.int64), matrix.col.astype(np.int64), matrix.data, mass
    return PackedProblem(lengths, *(torch.from_numpy(array).to(device) for array in arrays))


def connected_components(problem: PackedProblem) -> Tensor:
    """The first vertex (V,) of the component of each vertex."""
    label = torch.arange(len(problem.mass), device=problem.mass.device)
    while True:
        # Each component takes the smallest number that an edge leads to. Then numbers are followed to their ends.
        of_rows = label[problem.rows]
        joined = label.scatter_reduce(0, of_rows, torch.minimum(of_rows, label[problem.columns]), "amin")
        joined = joined[joined]
        joined = joined[joined]
        if torch.equal(joined, label):
            return label
        label = joined


def _without_repeats(matrix: scipy.sparse.csr_matrix) -> scipy.sparse.csr_matrix:
    """The matrix with repeated entries added up, in order of the columns."""
    if matrix.has_canonical_format:
        return matrix
    matrix = matrix.copy()
    matrix.sum_duplicates()
    return matrix


class BatchedShiftInvert:
    """`ShiftInvert` for several components at once, with tensors on a device.

    Vectors are rows (components, count, size) or columns (components · size, count). The size is that of the largest
    component, rounded up to a multiple of CHUNK; other places hold zeros. `failed` holds the indices of the components
    whose L + σM isn't positive definite.
    """

    # A solve for eight right-hand sides takes hardly longer than one for four. With more, the small matrices on the CPU
    # become larger.
    block = 8

    def __init__(self, problem: PackedProblem, shifts: Sequence[float]) -> None:
        self.device = device = problem.mass.device
        self.sizes = problem.lengths
        self.shift = np.array(shifts)
        self.size = -(-max(self.sizes) // CHUNK) * CHUNK
        count = len(self.sizes) * self.size

        component = torch.arange(len(self.sizes), device=device).repeat_interleave(torch.tensor(self.sizes).to(device))
        starts = torch.tensor([0, *np.cumsum(self.sizes)[:-1]]).to(device)
        # The row of each vertex in columns.
        self.place = torch.arange(len(component), device=device) + (component * self.size - starts[component])
        self.root = torch.ones(count, dtype=torch.float64, device=device)
        self.root[self.place] = problem.mass.sqrt()
        constant = torch.zeros_like(self.root)
        constant[self.place] = self.root[self.place]
        self.root, constant = (t.view(len(self.sizes), 1, self.size) for t in (self.root, constant))
        self.constant = constant / (constant * constant).sum(-1, keepdim=True).sqrt()

        # One block-diagonal matrix, scaled as in `ShiftInvert`.
        rows, columns = self.place[problem.rows], self.place[problem.columns]
        scale = 1 / self.root.flatten()
        values = problem.values * scale[rows] * scale[columns]
        on_diagonal, off = rows == columns, rows != columns
        self.diagonal = self.from_host(np.repeat(self.shift, self.size))
        self.diagonal[rows[on_diagonal]] += values[on_diagonal]
        self.entries = rows[off], columns[off], values[off]
        graph = torch.full((count,), -1, device=device)
        graph[self.place] = component
        positions = problem.positions
        if positions is not None:
            positions = torch.zeros(count, 3, dtype=positions.dtype, device=device).index_put((self.place,), positions)
        self.factor = MultifrontalCholesky(*self.entries, self.diagonal, graph, positions)
        self.failed = self.factor.failed

    def apply(self, rows: Tensor) -> Tensor:
        return self._as_one(self.factor.solve, rows)

    def apply_inverse(self, rows: Tensor) -> Tensor:
        row, column, values = self.entries
        starts = torch.searchsorted(row, torch.arange(len(self.diagonal) + 1, device=self.device))
        shape = len(self.diagonal), len(self.diagonal)
        matrix = csr_tensor(starts, column, values, shape)
        return self._as_one(lambda x: matrix @ x + self.diagonal[:, None] * x, rows)

    def _as_one(self, function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """Apply a function of columns to rows."""
        components, count, size = rows.shape
        return function(rows.mT.reshape(-1, count)).view(components, size, count).mT.contiguous()

    def start(self, count: int) -> Tensor:
        """Random rows orthogonal to the constant, the same at every call and on every device."""
        bits = torch.arange(1, 1 + count * self.size, device=self.device) * GOLDEN_RATIO
        for shift, factor in SPLITMIX:
            bits = (bits ^ (bits >> shift)) * factor
        rows = bits.view(count, self.size).double() / 2.0**63
        return without_constant(torch.where(self.constant > 0, rows, 0), self.constant)  # type: ignore[no-any-return]

    def to_host(self, rows: Tensor) -> Array:
        return rows.cpu().numpy()

    def from_host(self, rows: NDArray[Any]) -> Tensor:
        return torch.from_numpy(rows).to(self.device)


def largest_pairs(operator: BatchedShiftInvert, wanted: int, tolerance: float, on_cores: Map) -> tuple[Array, Tensor]:
    """The largest eigenpairs of each operator that are orthogonal to the constant.

    wanted: number of pairs
    tolerance: the largest residual, relative to the value

    Returns values (components, wanted), descending, and orthonormal rows (components, wanted, size). The values of
    operators whose pairs haven't converged are not a number.
    """
    block, count = operator.block, len(operator.sizes)
    enough = wanted * 5 // 2 + 14 * block  # usually; there is room for a quarter more
    rank = min(operator.sizes) - 1
    capacity = max(min(enough * 5 // 4 + 4 * block, rank - block), wanted + 2 * block) // block * block
    basis = torch.empty(count * operator.size, 1 + capacity + block, dtype=torch.float64, device=operator.device)
    basis[:, :1] = operator.constant.view(-1, 1)
    first = operator.apply(operator.start(block)).mT.reshape(-1, block)
    for _ in range(2):  # twice, because of rounding errors
        first, _ = _orthogonalized(count, basis[:, :1], first)
    orthonormalized = replayed(partial(_orthonormalized, count), first)
    basis[:, 1 : 1 + block], _ = orthonormalized(first)
    projected: Array = np.zeros((count, capacity + block, capacity + block))
    pairs: dict[int, Pairs] = {}
    size = 0
    missing = wanted
    while missing and size < capacity:
        target = size + missing // 2 if size else enough - block  # the last pairs converge quickly
        steps = []
        start = size
        while size < min(target + block, capacity):
            steps.append(_extend(operator, basis, size, orthonormalized))
            size += block
        on_host = (torch.stack(tensors).cpu().numpy() for tensors in zip(*steps, strict=True))
        for at, (diagonal, coupling) in enumerate(zip(*on_host, strict=True)):
            lo = start + at * block
            projected[:, lo : lo + block, lo : lo + block] = diagonal
            projected[:, lo + block : lo + 2 * block, lo : lo + block] = coupling
        left = [i for i in range(count) if i not in pairs and np.isfinite(projected[i]).all()]
        solve = _ritz if count > 1 else partial(_ritz_on_device, operator)
        missing = 0
        for i, (values, coordinates) in zip(
            left, on_cores(solve, (projected[i, :size, :size] for i in left)), strict=True
        ):
            values, coordinates = values[:wanted], coordinates[:, :wanted]
            last = projected[i, size : size + block, size - block : size] @ coordinates[-block:]
            done = int((np.linalg.norm(last, axis=0) <= tolerance * values).sum())
            missing = max(missing, wanted - done)
            if done == wanted:
                pairs[i] = values, coordinates
    values, together = np.full((count, wanted), np.nan), np.zeros((count, size, wanted))
    for i, (row, coordinates) in pairs.items():
        values[i], together[i, : len(coordinates)] = row, coordinates
    space = basis.view(count, operator.size, -1)[:, :, 1 : 1 + size]
    rows = operator.from_host(together).mT @ space.mT
    for i in set(range(count)) - pairs.keys():
        rows[i] = torch.eye(wanted, operator.size)  # orthonormal, as the others
    return values, rows


def _extend(
    operator: BatchedShiftInvert, basis: Tensor, size: int, orthonormalized: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Apply the operators to the block at `size`, and write the part that is orthogonal to the basis after it.

    Returns the operators on the block, and the coupling of the next block to it, (components, block, block) each.
    """
    block, count = operator.block, len(operator.sizes)
    lo, hi = 1 + size, 1 + size + block
    result = operator.factor.solve(basis[:, lo:hi])
    # The result has large parts along the last two blocks, and small ones along the others. After large parts are
    # removed, rounding leaves some, so these are removed twice.
    result, overlap = _orthogonalized(count, basis[:, max(lo - block, 1) : hi], result)
    result, rest = _orthogonalized(count, basis[:, :hi], result)
    basis[:, hi : hi + block], coupling = orthonormalized(result)
    return overlap[:, -block:] + rest[:, -block:], coupling.clone()


def _orthogonalized(count: int, basis: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Columns without their part in the space of known orthonormal ones, and the coordinates of this part."""
    overlap = _products(count, basis, columns)
    columns = torch.baddbmm(_split(columns, count), _split(basis, count), overlap, alpha=-1).flatten(0, 1)
    return columns, overlap


def _orthonormalized(count: int, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Q and R of columns = Q R, by Cholesky QR, repeated once for accuracy. Not a number where that fails."""
    upper = torch.eye(columns.shape[1], dtype=columns.dtype, device=columns.device).expand(count, -1, -1)
    for _ in range(2):
        gram = _products(count, columns, columns)
        inverse = _kernels(columns).inverse_factors(gram)
        columns = (_split(columns, count) @ inverse.mT).flatten(0, 1)
        upper = inverse @ gram @ upper
    return columns, upper


def _kernels(columns: Tensor) -> ModuleType:
    if HAS_TRITON and columns.is_cuda:
        from diffnet.ops.functional_maps import kernels

        return kernels
    return reference


def _products(count: int, one: Tensor, other: Tensor) -> Tensor:
    """The scalar products (components, one, other) of columns, added up in a fixed order."""
    chunks = len(one) // CHUNK
    sums = _split(one, chunks).mT @ _split(other, chunks)
    return sums.view(count, -1, *sums.shape[1:]).sum(1)


def _split(columns: Tensor, parts: int) -> Tensor:
    """Columns (n, c) as (parts, n / parts, c), without a copy."""
    return columns.view(parts, -1, columns.shape[1])


def _ritz(projected: Array) -> Pairs:
    """Eigenvalues, descending, and eigenvectors of a matrix, of which the lower half is read."""
    values, coordinates = np.linalg.eigh(projected)
    return values[::-1], coordinates[:, ::-1]


def _ritz_on_device(operator: BatchedShiftInvert, projected: Array) -> Pairs:
    """`_ritz` on the device, which takes a third of the time for one matrix. Many are solved sooner by many cores."""
    values, coordinates = torch.linalg.eigh(operator.from_host(projected))
    return operator.to_host(values.flip(0)), operator.to_host(coordinates.flip(1))
