"""Block Lanczos with thick restarts, for the largest eigenpairs of an operator that is costly to apply."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from diffnet.geometry.eigen.problem import Array, Pairs
from diffnet.geometry.eigen.shift_invert import Rows, ShiftInvert, turned

# Small matrices are NumPy's, too: the threads of SciPy's own BLAS and of NumPy's would wait for each other.
MOST_RESTARTS = 20
ROUNDING = 1e-15


class KrylovSpace:
    """An orthonormal basis Q of a block Krylov space and the operator on it, T = Q A Qᵀ (Golub & Underwood 1977).

    Vectors are rows. A new block is made orthogonal to the last two, and from time to time to all of the basis, since
    orthogonality is lost as pairs converge. When the basis is full it is cut down to the wanted Ritz vectors and more,
    and goes on from there (Wu & Simon 2000, "Thick-restart Lanczos").

    Where the operator is several, as `ShiftInverts` is, there is a space for each, and all arrays have one dimension
    more, the first. They take the same steps until the last has converged.
    """

    def __init__(self, operator: ShiftInvert, wanted: int, block: int, tolerated_loss: float = 1e-8) -> None:
        self.operator = operator
        self.block = block
        self.wanted = wanted
        self.tolerated_loss = tolerated_loss  # of orthogonality; 0 is slower, and takes harder problems
        # As many vectors let the pairs wanted converge, as a rule; room for a quarter more is rarely needed.
        self.enough = wanted * 5 // 2 + 12 * block
        self.capacity = max(min(self.enough * 5 // 4 + 4 * block, operator.rank - block), wanted + 2 * block)
        self.basis = operator.empty(self.capacity + block)
        several = self.basis.shape[:-2]
        self.projected: Array = np.zeros((*several, self.capacity + block, self.capacity + block))
        self.size = 0  # vectors that the operator was applied to; the next block lies behind them
        self.coupling: Array = np.zeros((*several, block, block))  # of the next block to the last one
        self.local = 0  # where the vectors begin that the next block couples to
        self.loss = ROUNDING  # of orthogonality between the next block and the others, estimated
        self.basis[..., :block, :], _ = self._orthonormalized(
            operator.without_constant(operator.apply(operator.start(block)))
        )

    def converge(self, tolerance: float) -> tuple[Array, Rows]:
        """Extend until the residuals of the wanted pairs are below `tolerance` times their values.

        Returns values (wanted,), descending, and orthonormal vectors (wanted, V).
        Raises ArithmeticError where they don't converge in any reasonable time, and LinAlgError where the space has no
        more dimensions.
        """
        several = self.projected.shape[:-2]
        spaces = range(int(np.prod(several)))
        found: dict[int, Pairs] = {}  # of the spaces that are done
        restarts = 0
        check = self.enough
        while True:
            while self.size < min(check, self.capacity - self.block + 1):
                self._extend()
            left = [space for space in spaces if space not in found]
            missing = 0  # pairs of the space that needs the most
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
                if restarts == MOST_RESTARTS or not np.isfinite(self.coupling).all():
                    raise ArithmeticError(f"{missing} of {self.wanted} pairs haven't converged")
                restarts += 1
                found.clear()
                self._restart(ritz if len(left) == len(spaces) else self._ritz(spaces))
            check = self.size + max(self.block, missing // 2)  # the last pairs converge fast

    def _vectors(self, coordinates: Array) -> Rows:
        """Linear combinations of the basis, one for each column of (size, count) → (count, n)."""
        return self.operator.from_host(np.ascontiguousarray(turned(coordinates))) @ self.basis[..., : self.size, :]

    def _extend(self) -> None:
        """Apply the operator to the next block, and take what is new in the result as the block after it."""
        lo, hi = self.size, self.size + self.block
        rows = self.operator.apply(self.basis[..., lo:hi, :])
        near = self.basis[..., self.local : hi, :]
        for _ in range(2):  # twice, against rounding errors
            overlap = near @ turned(rows)
            rows -= turned(overlap) @ near
            self.projected[..., self.local : hi, lo:hi] += self.operator.to_host(overlap)
        rows = self.operator.without_constant(rows)  # of which rounding errors grow like the others
        block, coupling = self._orthonormalized(rows)
        # Rounding errors along converged vectors, of the largest values, grow by this factor from block to block. Half
        # the digits of orthogonality are enough for projections to be right to all of them (Simon 1984).
        self.loss *= float((_diagonal(self.projected).max(-1) / _diagonal(coupling).min(-1)).max())
        if self.loss > self.tolerated_loss:
            # Two blocks in a row that are orthogonal to all others let them start anew.
            known, recent = self.basis[..., :lo, :], self.basis[..., lo : hi + self.block, :]
            recent[..., self.block :, :] = rows
            overlap = known @ turned(recent)
            recent -= turned(overlap) @ known
            self.projected[..., :lo, lo:hi] += self.operator.to_host(overlap)[..., self.block :]
            last, rows = recent[..., : self.block, :], recent[..., self.block :, :]
            last[...] = self._orthonormalized(last)[0]
            overlap = last @ turned(rows)
            rows -= turned(overlap) @ last
            self.projected[..., lo:hi, lo:hi] += self.operator.to_host(overlap)
            block, coupling = self._orthonormalized(self.operator.without_constant(rows))
            self.loss = ROUNDING
        self.basis[..., hi : hi + self.block, :], self.coupling = block, coupling
        self.local, self.size = lo, hi

    def _ritz(self, spaces: Sequence[int]) -> list[Pairs]:
        """All Ritz values (size,) of these, descending, and the coordinates of their vectors, as columns."""
        projected = self.projected.reshape(-1, *self.projected.shape[-2:])[:, : self.size, : self.size]

        def solved(space: int) -> Pairs:
            values, coordinates = np.linalg.eigh(projected[space], UPLO="U")
            return values[::-1], coordinates[:, ::-1]

        if len(spaces) == 1:
            return [solved(spaces[0])]
        with ThreadPoolExecutor() as pool:
            return list(pool.map(solved, spaces))

    def _restart(self, ritz: Sequence[Pairs]) -> None:
        keep = min(self.wanted + (self.capacity - self.wanted) // 3, self.size)
        several = self.projected.shape[:-2]
        values = np.stack([values[:keep] for values, _ in ritz]).reshape(*several, keep)
        coordinates = np.stack([coordinates[:, :keep] for _, coordinates in ritz])
        kept = self._vectors(coordinates.reshape(*several, self.size, keep))
        next_block = 1.0 * self.basis[..., self.size : self.size + self.block, :]  # they may overlap
        self.basis[..., keep : keep + self.block, :] = next_block
        self.basis[..., :keep, :] = kept
        self.projected[:] = 0
        self.projected[..., np.arange(keep), np.arange(keep)] = values
        self.size, self.local, self.loss = keep, 0, ROUNDING

    def _orthonormalized(self, rows: Rows) -> tuple[Rows, Array]:
        """Q and R of rowsᵀ = Qᵀ R, by Cholesky-QR, twice for accuracy."""
        upper: Array = np.eye(self.block)
        for _ in range(2):
            # By a copy: what BLAS has for a matrix times its own transpose takes three times as long on a few rows.
            lower = np.linalg.cholesky(self.operator.to_host(rows @ turned(1.0 * rows)))
            rows, upper = self.operator.from_host(np.linalg.inv(lower)) @ rows, turned(lower) @ upper
        return rows, upper


def _diagonal(matrix: Array) -> Array:
    return np.diagonal(matrix, axis1=-2, axis2=-1)
