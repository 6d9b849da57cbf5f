"""The table of coefficients that the kernels of gradient features read."""

from __future__ import annotations

import torch
from torch import Tensor

from diffnet.ops.common.precision import dot_precision


def empty_table(evecs: Tensor, d: Tensor, rotation: bool) -> Tensor:
    """Return an empty table of D, P and, with rotations, Q for d (B, K, C), in the arithmetic of products with evecs.

    It is (2 or 3, B, K, C) in the dtype of the evecs or, for bf16x3, (2, 2 or 3, B, K, C) bfloat16 with the two parts
    of each number.
    """
    shape = 3 if rotation else 2, *d.shape
    if dot_precision(evecs) == "bf16x3":
        return evecs.new_empty(2, *shape, dtype=torch.bfloat16)
    return evecs.new_empty(shape)
