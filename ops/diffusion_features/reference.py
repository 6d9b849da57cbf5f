"""The first half of a block in plain PyTorch: the CPU path, and the reference for the kernels.

Arguments are as in `ops.diffusion_features.op` and `ops.diffusion_features.sparse`. Mixed dtypes are promoted.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from diffnet.ops.common.precision import promoted_dtype
from diffnet.ops.gradient_features.reference import gradient_features, values_and_gradient_features
from diffnet.ops.sparse.op import spmm
from diffnet.ops.sparse.pattern import Pattern
from diffnet.ops.spectral.reference import diffuse, from_spectral, to_spectral


def diffusion_and_gradient_features(
    x: Tensor,
    mass: Tensor,
    evals: Tensor,
    evecs: Tensor,
    gradient_evecs: Tensor,
    time: Tensor,
    a_re: Tensor,
    a_im: Tensor | None,
    ptr: Tensor,
    lengths: Sequence[int] | None = None,
    swapped: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """x, the diffused function and its gradient features, computed one after the other."""
    dtype = promoted_dtype(x, evecs)
    evecs, gradient_evecs = evecs.to(dtype), gradient_evecs.to(dtype)
    coefficients = diffuse(to_spectral(x, evecs, mass, ptr, lengths), evals, time.clamp(min=0))
    return x, *values_and_gradient_features(coefficients, evecs, gradient_evecs, a_re, a_im, ptr, lengths, swapped)


def sparse_diffusion_and_gradient_features(
    x: Tensor,
    mass: Tensor,
    evals: Tensor,
    evecs: Tensor,
    pattern: Pattern,
    gradient: Tensor,
    time: Tensor,
    a_re: Tensor,
    a_im: Tensor | None,
    ptr: Tensor,
    lengths: Sequence[int] | None = None,
    swapped: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """x, the diffused function and its gradient features, with a sparse product, computed one after the other."""
    coefficients = diffuse(to_spectral(x, evecs, mass, ptr, lengths), evals, time.clamp(min=0))
    diffused = from_spectral(coefficients, evecs, ptr, lengths)
    return x, diffused, gradient_features(spmm(pattern, gradient, diffused, backend="torch"), a_re, a_im, swapped)
