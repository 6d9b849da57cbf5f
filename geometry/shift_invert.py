"""The inverse of L + σM as a symmetric operator, which turns the smallest eigenvalues into the largest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import cholespy
import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffnet.geometry.cudss import CudssFactor, is_chosen

Small: TypeAlias = NDArray[np.float64]
DEVICE_LIMIT = 4096  # below this many vertices the CPU is done before a GPU has started its kernels
Rows: TypeAlias = Any  # vectors as the rows of a matrix (count, V): NumPy arrays here, tensors on a GPU


class ShiftInvert:
    """M^½ (L + σM)⁻¹ M^½ off the constants, for vectors held as the rows of NumPy arrays.

    laplacian: (V, V) of one connected component, mass: (V,) > 0, shift: σ > 0

    An eigenvalue θ stands for λ = 1/θ − σ, an eigenvector y for φ = M^−½ y. Raises ArithmeticError where L + σM
    isn't positive definite.
    """

    block = 4  # rows to apply it to at once: as many as CHOLMOD solves together; the fewer, the fewer it takes in all

    def __init__(self, laplacian: scipy.sparse.csr_matrix, mass: NDArray[np.float64], shift: float) -> None:
        self.rank = len(mass) - 1
        self.constant = self.from_host(np.sqrt(mass / mass.sum()))
        # Scaled before it is inverted rather than around each solve. Cholesky's rounding doesn't depend on the scaling.
        scale = scipy.sparse.diags(1 / np.sqrt(mass))
        matrix = (scale @ laplacian @ scale + shift * scipy.sparse.eye(len(mass))).tocsr()
        matrix.sort_indices()
        self.factor = self._factorized(matrix)

    def _factorized(self, matrix: scipy.sparse.csr_matrix) -> Any:
        arrays = (matrix.indptr.astype(np.int32), matrix.indices.astype(np.int32), matrix.data)
        on_device = (self.from_host(array) for array in arrays)
        try:
            # Of a symmetric matrix, rows are columns.
            return cholespy.CholeskySolverD(matrix.shape[0], *on_device, cholespy.MatrixType.CSC)
        except ValueError as e:
            raise ArithmeticError(str(e)) from e

    def apply(self, rows: Rows) -> Rows:
        """Rounding errors leave some of the constant in the result."""
        right = self.contiguous(rows.T)
        left = self.empty(len(rows)).reshape(right.shape)
        self.factor.solve(right, left)
        return self.contiguous(left.T)

    def start(self, count: int) -> Rows:
        """Random rows, the same ones at every call."""
        rows = np.random.default_rng(0).standard_normal((count, len(self.constant)))
        return self.without_constant(self.from_host(rows))

    def without_constant(self, rows: Rows) -> Rows:
        """The part of each row that is orthogonal to the constant, M^½ 1."""
        for _ in range(2):  # once leaves rounding errors, of what may be 10⁹ times as long as the rest
            rows = rows - (rows @ self.constant)[:, None] * self.constant
        return rows

    def empty(self, count: int) -> Rows:
        return np.empty((count, len(self.constant)))

    def contiguous(self, array: Rows) -> Rows:
        return np.ascontiguousarray(array)

    def to_host(self, small: Rows) -> Small:
        return small  # type: ignore[no-any-return]

    def from_host(self, small: NDArray[Any]) -> Rows:
        return small


class DeviceShiftInvert(ShiftInvert):
    """The same with solves and products on a GPU; the factorisation is done on the CPU and copied there."""

    block = 16  # a solve takes as long for 16 rows as for 8: it waits for one vertex after another

    def __init__(
        self, laplacian: scipy.sparse.csr_matrix, mass: NDArray[np.float64], shift: float, device: torch.device
    ) -> None:
        self.device = device
        super().__init__(laplacian, mass, shift)

    def empty(self, count: int) -> Tensor:
        return torch.empty(count, len(self.constant), dtype=torch.float64, device=self.device)

    def contiguous(self, array: Tensor) -> Tensor:
        return array.contiguous()

    def to_host(self, small: Tensor) -> Small:
        return small.cpu().numpy()

    def from_host(self, small: NDArray[Any]) -> Tensor:
        return torch.from_numpy(small).to(self.device)


class CudssShiftInvert(DeviceShiftInvert):
    """The same, factorised on the GPU too."""

    block = 8  # a solve for 16 rows takes twice as long, and more rows in all make small matrices on the CPU larger

    def _factorized(self, matrix: scipy.sparse.csr_matrix) -> CudssFactor:
        return CudssFactor(matrix, self.block, self.device)

    def apply(self, rows: Tensor) -> Tensor:
        factor: CudssFactor = self.factor
        return factor.solve(rows)


class ShiftInverts(DeviceShiftInvert):
    """Several of them at once, for vectors (how many, count, V) that are 0 beyond the vertices of each."""

    def __init__(self, operators: Sequence[DeviceShiftInvert]) -> None:
        self.operators, self.device, self.block = operators, operators[0].device, operators[0].block
        self.rank = min(operator.rank for operator in operators)
        self.sizes = [len(operator.constant) for operator in operators]
        self.constant = self._padded([operator.constant[None] for operator in operators])

    def apply(self, rows: Tensor) -> Tensor:
        given = zip(self.operators, rows, self.sizes, strict=True)
        return self._padded([operator.apply(own[:, :size]) for operator, own, size in given])

    def start(self, count: int) -> Tensor:
        return self._padded([operator.start(count) for operator in self.operators])

    def without_constant(self, rows: Tensor) -> Tensor:
        for _ in range(2):
            rows = rows - (rows @ self.constant.mT) * self.constant
        return rows

    def empty(self, count: int) -> Tensor:
        shape = len(self.operators), count, max(self.sizes)
        return torch.empty(shape, dtype=torch.float64, device=self.device)

    def _padded(self, parts: Sequence[Tensor]) -> Tensor:
        out = self.empty(len(parts[0]))
        for own, part, size in zip(out, parts, self.sizes, strict=True):
            own[:, :size], own[:, size:] = part, 0
        return out


def shift_invert(
    laplacian: scipy.sparse.csr_matrix, mass: NDArray[np.float64], shift: float, device: torch.device
) -> ShiftInvert:
    """By the fastest means there are."""
    if device.type == "cpu" or not is_worth_a_device(mass):
        return ShiftInvert(laplacian, mass, shift)
    return (CudssShiftInvert if is_chosen(device) else DeviceShiftInvert)(laplacian, mass, shift, device)


def is_worth_a_device(mass: NDArray[np.float64]) -> bool:
    return len(mass) >= DEVICE_LIMIT
