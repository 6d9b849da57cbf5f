"""A sparse matrix of complex numbers as sparse matrices of real numbers, for the CPU path."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from diffnet.ops.sparse.pattern import Pattern


class ComplexEntries(NamedTuple):
    """The entries of G = G_X + i G_Y, for vectors with all real parts first. Each entry of G becomes two.

    indices: (2 nnz,) columns
    real, imaginary: (2 nnz,) the values that give the real and the imaginary part of a product
    """

    indices: Tensor
    real: Tensor
    imaginary: Tensor


class _Known(NamedTuple):
    gradient: ref[Tensor]
    version: int
    entries: dict[bool, ComplexEntries]


# The last matrix. All blocks of a network use the same one, and making its entries takes 3 % of a step on 1,000
# vertices. Those of all meshes of a data set would take too much memory.
_last: WeakKeyDictionary[Pattern, _Known] = WeakKeyDictionary()


def complex_entries(pattern: Pattern, gradient: Tensor, *, adjoint: bool) -> ComplexEntries:
    """The entries of G, or of its adjoint Gᴴ, row by row.

    gradient: (2, nnz) the real and the imaginary parts of G
    """
    if gradient.is_inference():  # such a tensor doesn't tell whether it has been changed
        return _compute(pattern, gradient, adjoint)
    known = _last.get(pattern)
    if known is None or known.gradient() is not gradient or known.version != gradient._version:
        known = _Known(ref(gradient), gradient._version, {})
        _last.clear()
        _last[pattern] = known
    if adjoint not in known.entries:
        with torch.inference_mode(False):  # training may use them, too
            known.entries[adjoint] = _compute(pattern, gradient, adjoint)
    return known.entries[adjoint]


def _compute(pattern: Pattern, gradient: Tensor, adjoint: bool) -> ComplexEntries:
    if adjoint:
        pattern, order = pattern.transpose
        gradient = gradient[:, order]
    x, y = gradient
    y = -y if adjoint else y
    indices = torch.stack([pattern.indices, pattern.indices + pattern.columns], 1)
    real, imaginary = torch.stack([x, -y], 1), torch.stack([y, x], 1)
    return ComplexEntries(indices.flatten(), real.flatten(), imaginary.flatten())
