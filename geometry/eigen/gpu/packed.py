"""Several eigenproblems as one block-diagonal matrix on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from diffnet.geometry.eigen.problem import Problem


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

    def restricted(self, kept: Tensor, lengths: tuple[int, ...]) -> PackedProblem:
        """The problem on some vertices, given in their new order, with new lengths."""
        place = torch.full_like(self.mass, -1, dtype=torch.int64)
        place[kept] = torch.arange(len(kept), device=kept.device)
        rows, columns = place[self.rows], place[self.columns]
        inside = ((rows >= 0) & (columns >= 0)).nonzero()[:, 0]
        rows, columns, values = rows[inside], columns[inside], self.values[inside]
        positions = None if self.positions is None else self.positions[kept]
        return PackedProblem(lengths, rows, columns, values, self.mass[kept], positions)

    def on_host(self) -> scipy.sparse.csr_matrix:
        """L as one SciPy matrix."""
        rows, columns, values = (t.cpu().numpy() for t in (self.rows, self.columns, self.values))
        return scipy.sparse.csr_matrix((values, (rows, columns)), (len(self.mass),) * 2)


def packed(problems: Sequence[Problem], device: torch.device) -> PackedProblem:
    """Problems with SciPy matrices, on a device."""
    lengths = tuple(len(mass) for _, mass in problems)
    blocks = [_without_repeats(laplacian) for laplacian, _ in problems]
    starts = np.cumsum([0, *lengths[:-1]])
    rows = [
        np.repeat(np.arange(len(b.indptr) - 1) + at, np.diff(b.indptr)) for b, at in zip(blocks, starts, strict=True)
    ]
    columns = [b.indices.astype(np.int64) + at for b, at in zip(blocks, starts, strict=True)]
    arrays = rows, columns, [b.data for b in blocks], [mass for _, mass in problems]
    return PackedProblem(lengths, *(torch.from_numpy(np.concatenate(array)).to(device) for array in arrays))


def connected_components(problem: PackedProblem) -> Tensor:
    """The first vertex (V,) of the component of each vertex."""
    label = torch.arange(len(problem.mass), device=problem.mass.device)
    while True:
        # Each component takes the smallest number that an edge leads to. Then numbers are followed to their ends.
        lower = torch.minimum(label[problem.rows], label[problem.columns])
        joined = label.scatter_reduce(0, label[problem.rows], lower, "amin")
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
