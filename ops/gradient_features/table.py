"""The table of coefficients that the kernels of gradient features read."""

from __future__ import annotations

from torch import Tensor

from diffnet.ops.common.precision import dot_precision, empty_operand


def empty_table(evecs: Tensor, d: Tensor, rotation: bool) -> Tensor:
    """Return an empty table of D, P and, with rotations, Q for d (B, K, C), in the arithmetic of products with evecs.

    It is (2 or 3, B, K, C) in the dtype of the evecs or, if numbers have several parts, (parts, 2 or 3, B, K, C)
    bfloat16.
    """
    shape = 3 if rotation else 2, *d.shape
    return empty_operand(evecs, shape, evecs.dtype, dot_precision(evecs))
