"""Block Lanczos iteration with thick restarts, for the largest eigenpairs of an operator that is expensive to apply.

Small matrices use NumPy's linear algebra. SciPy has its own BLAS, whose threads and NumPy's would wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from diffnet.geometry.eigen.problem import Array, Pairs
from diffnet.geometry.eigen.shift_invert import Rows, ShiftInvert, transpose

MAX_RESTARTS = 20
ROUNDING = 1e-15
WELL_CONDITIONED = 30  # rows of at most this condition are orthonormal to 1e-13 after one Cholesky QR


class KrylovSpace:
    """An orthonormal basis Q of a block Krylov space and the operator on it, T = Q A Qᵀ (Golub & Underwood 1977).

    Vectors are rows. A new block is orthogonalized against the last two blocks. Orthogonality to the others is lost as
    pairs converge, so from time to time a block is orthogonalized against the whole basis. A full basis is reduced to
    the wanted Ritz vectors and some more, and then extended again (Wu & Simon 2000, "Thick-restart Lanczos").

    A `BatchedShiftInvert` has one space for each of its problems. All arrays then have a leading batch dimension, and
    all spaces take the same steps until the last one has converged.

    operator: see `ShiftInvert`
    wanted: number of pairs to find
    block: number of vectors that the operator is applied to at once
    tolerated_loss: loss of orthogonality at which a block is orthogonalized against the whole basis. At 0 every block
        is, which is slower and works for harder problems.
    """

    def __init__(self, operator: ShiftInvert, wanted: int, block: int, tolerated_loss: float = 1e-8) -> None:
        self.operator = operator
        self.block = block
        self.wanted = wanted
        self.tolerated_loss = tolerated_loss
        # This number of vectors is usually enough. There is room for a quarter more, which is rarely used up.
        self.enough = wanted * 5 // 2 + 15 * block
        self.capacity = max(min(self.enough * 5 // 4 + 4 * block, operator.rank - block), wanted + 2 * block)
        self.basis = operator.empty(self.capacity + block)
        several = self.basis.shape[:-2]
        self.projected: Array = np.zeros((*several, self.capacity + block, self.capacity + block))
        self.size = 0  # number of vectors that the operator was applied to; the next block follows them
        self.coupling: Array = np.zeros((*several, block, block))  # between the next block and the last one
        self.local = 0  # index of the first vector that the next block couples to
        self.loss = ROUNDING  # estimated scalar products of the next block with the others
        self.basis[..., :block, :], _ = self._orthonormalized(
            operator.without_constant(operator.apply(operator.start(block)))
        )

    def converge(self, tolerance: float) -> tuple[Array, Rows]:
        """Extend the space until the residuals of the wanted pairs are below `tolerance` times their values.

        Returns values (wanted,), descending, and orthonormal vectors (wanted, V).
        Raises ArithmeticError if they don't converge within MAX_RESTARTS restarts, and LinAlgError if the space can't
        be extended.
        """
        several = self.projected.shape[:-2]
        spaces = range(int(np.prod(several)))
        found: dict[int, Pairs] = {}  # of the spaces that have converged
        restarts = 0
        check = self.enough
        while True:
            while self.size < min(check, self.capacity - self.block + 1):
                self._extend()
            left = [space for space in spaces if space not in found]
            missing = 0  # largest number of missing pairs in any space
            ritz = self._ritz(left)
            couplings = self.coupling.reshape(-1, self.block, self.block)
            for space, (values, coordinates) in zip(left, ritz, strict=True):
                values, coordinates = values[: self.wanted], coordinates[:, : self.wanted]
                residuals = np.linalg.norm(couplings[space] @ coordinates[-self.block :], axis=0)
                done = int((residuals <= tolerance * values).sum())
                missing = max(missing, self.wanted - done)
                if done == self.wanted:
                    found[space] = values, coordinates
            if missing == 0:
                together = np.zeros((len(spaces), self.size, self.wanted))
                for space, (_, coordinates) in found.items():
                    together[space, : len(coordinates)] = coordinates
                values = np.stack([found[space][0] for space in spaces])
                return values.reshape(*several, -1), self._vectors(together.reshape(*several, *together.shape[1:]))
            if self.size > self.capacity - self.block:
                if restarts == MAX_RESTARTS or not np.isfinite(self.coupling).all():
                    raise ArithmeticError(f"{missing} of {self.wanted} pairs haven't converged")
                restarts += 1
                found.clear()
                self._restart(ritz if len(left) == len(spaces) else self._ritz(spaces))
            # The last pairs converge quickly. On small meshes, a check takes longer than several blocks.
            check = self.size + max(3 * self.block, missing // 2)

    def _vectors(self, coordinates: Array) -> Rows:
        """Linear combinations (count, V) of the basis, one for each column of `coordinates` (size, count)."""
        return self.operator.from_host(np.ascontiguousarray(transpose(coordinates))) @ self.basis[..., : self.size, :]

    def _extend(self) -> None:
        """Apply the operator to the next block.

        The part of the result that is orthogonal to the basis is the block after it.
        """
        lo, hi = self.size, self.size + self.block
        rows = self.operator.apply(self.basis[..., lo:hi, :])
        near = self.basis[..., self.local : hi, :]
        for _ in range(2):  # twice, because of rounding errors
            overlap = near @ transpose(rows)
            rows -= transpose(overlap) @ near
            self.projected[..., self.local : hi, lo:hi] += self.operator.to_host(overlap)
        rows = self.operator.without_constant(rows)  # rounding errors along the constant would grow, too
        block, coupling = self._orthonormalized(rows)
        # Rounding errors along converged vectors, which have the largest values, grow by this factor from block to
        # block. Orthogonality to half of the digits is enough for projections with all digits correct (Simon 1984).
        self.loss *= float((_diagonal(self.projected).max(-1) / _diagonal(coupling).min(-1)).max())
        if self.loss > self.tolerated_loss:
            # The recurrence starts again from two successive blocks that are orthogonal to all others.
            known, recent = self.basis[..., :lo, :], self.basis[..., lo : hi + self.block, :]
            recent[..., self.block :, :] = rows
            overlap = self.operator.orthogonalize(recent, known)
            self.projected[..., :lo, lo:hi] += self.operator.to_host(overlap)[..., self.block :]
            last, rows = recent[..., : self.block, :], recent[..., self.block :, :]
            last[...] = self._orthonormalized(last)[0]
            overlap = last @ transpose(rows)
            rows -= transpose(overlap) @ last
            self.projected[..., lo:hi, lo:hi] += self.operator.to_host(overlap)
            block, coupling = self._orthonormalized(self.operator.without_constant(rows))
            self.loss = ROUNDING
        self.basis[..., hi : hi + self.block, :], self.coupling = block, coupling
        self.local, self.size = lo, hi

    def _ritz(self, spaces: Sequence[int]) -> list[Pairs]:
        """All Ritz values (size,) of these spaces, descending, and the coordinates of their vectors as columns."""
        projected = self.projected.reshape(-1, *self.projected.shape[-2:])[:, : self.size, : self.size]

        def solved(space: int) -> Pairs:
            values, coordinates = np.linalg.eigh(projected[space], UPLO="U")
            return values[::-1], coordinates[:, ::-1]

        if len(spaces) == 1:
            return [solved(spaces[0])]
        with ThreadPoolExecutor() as pool:
            return list(pool.map(solved, spaces))

    def _restart(self, ritz: Sequence[Pairs]) -> None:
        """Reduce each space to its first Ritz vectors: the wanted ones and a third of the others."""
        keep = min(self.wanted + (self.capacity - self.wanted) // 3, self.size)
        several = self.projected.shape[:-2]
        values = np.stack([values[:keep] for values, _ in ritz]).reshape(*several, keep)
        coordinates = np.stack([coordinates[:, :keep] for _, coordinates in ritz])
        kept = self._vectors(coordinates.reshape(*several, self.size, keep))
        # A copy, since source and target may overlap.
        next_block = 1.0 * self.basis[..., self.size : self.size + self.block, :]
        self.basis[..., keep : keep + self.block, :] = next_block
        self.basis[..., :keep, :] = kept
        self.projected[:] = 0
        self.projected[..., np.arange(keep), np.arange(keep)] = values
        self.size, self.local, self.loss = keep, 0, ROUNDING

    def _orthonormalized(self, rows: Rows) -> tuple[Rows, Array]:
        """Q and R of rowsᵀ = Qᵀ R, by Cholesky QR, repeated once if rows are far from orthogonal."""
        upper: Array = np.eye(self.block)
        for _ in range(2):
            # The copy avoids BLAS's routine for a matrix times its own transpose, which is three times slower on few
            # rows.
            lower = np.linalg.cholesky(self.operator.to_host(rows @ transpose(1.0 * rows)))
            inverse = np.linalg.inv(lower)
            rows, upper = self.operator.from_host(inverse) @ rows, transpose(lower) @ upper
            squares = (lower * lower).sum((-2, -1)) * (inverse * inverse).sum((-2, -1))
            if squares.max() < WELL_CONDITIONED**2:
                break
        return rows, upper


def _diagonal(matrix: Array) -> Array:
    return np.diagonal(matrix, axis1=-2, axis2=-1)
