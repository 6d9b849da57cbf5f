"""A block of DiffusionNet in plain PyTorch: the definition, against which every faster form is tested.

`backend="torch"` runs these functions on any device. They are ordinary operations of PyTorch, so derivatives of any
order, forward mode and `torch.func` work.

Source: Sharp et al. 2022, "DiffusionNet: Discretization Agnostic Learning on Surfaces".

Shapes: V packed vertices, B meshes, K eigenpairs, C channels; mesh b owns the rows ptr[b]:ptr[b+1]. Mixed dtypes are
promoted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from diffnet.ops.common.precision import compute_dtype, promoted_dtype, sum_dtype
from diffnet.ops.common.ragged import row_lengths
from diffnet.ops.sparse.pattern import Pattern


class BlockArguments(NamedTuple):
    """What diffusion and gradient features read besides x.

    mass: (V,), the areas m of the vertices
    evals, evecs: (B, K) and (V, K), the eigenvalues λ and the eigenvectors Φ
    gradient: (2, V, K), the X and Y components of the gradients G Φ of the eigenvectors; or with a pattern (2, nnz),
        those of the sparse matrix G
    time: (C,), the learned times t. A negative time counts as 0.
    a_re, a_im: (C, C), the learned matrix A = A_re + i A_im; without rotations a_im is None
    ptr: (B+1,) int
    pattern: (V, V) of a sparse G, or None
    lengths: the rows of each mesh, or None to read them from ptr
    swapped: see `ops.gradient_features`
    """

    mass: Tensor
    evals: Tensor
    evecs: Tensor
    gradient: Tensor
    time: Tensor
    a_re: Tensor
    a_im: Tensor | None
    ptr: Tensor
    pattern: Pattern | None = None
    lengths: Sequence[int] | None = None
    swapped: bool = False

    @property
    def operators(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.mass, self.evals, self.evecs, self.gradient

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return *self.operators, self.time, self.a_re, self.a_im, self.ptr


def block(
    x: Tensor, o: BlockArguments, weights: Sequence[Tensor], biases: Sequence[Tensor], dropout: float = 0.0
) -> Tensor:
    """x + MLP([x, x_d, f])"""
    diffused, features = diffusion_and_gradient_features(x, o)
    return mlp([x, diffused, features], weights, biases, dropout=dropout, residual=x)


def diffusion_and_gradient_features(x: Tensor, o: BlockArguments) -> tuple[Tensor, Tensor]:
    """x_d = Φ D with D = exp(−λ tᵀ) ∘ Φᵀ (m ∘ x), and the features f of its gradients G x_d = (G Φ) D."""
    evecs = o.evecs.to(promoted_dtype(x, o.evecs))
    d = diffuse(to_spectral(x, evecs, o.mass, o.ptr, o.lengths), o.evals, o.time.clamp(min=0))
    if o.pattern is None:
        basis, rest = o.gradient.to(evecs.dtype), (o.a_re, o.a_im, o.ptr, o.lengths, o.swapped)
        return values_and_gradient_features(d, evecs, basis, *rest)
    diffused = from_spectral(d, evecs, o.ptr, o.lengths)
    gradients = spmm(o.pattern.row_indices, o.pattern.column_indices, len(x), o.gradient, diffused)
    return diffused, gradient_features(gradients, o.a_re, o.a_im, o.swapped)


def to_spectral(x: Tensor, evecs: Tensor, mass: Tensor, ptr: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
    """S = Φᵀ (m ∘ x) of each mesh: (B, K, C)"""
    dtype = promoted_dtype(x, evecs, mass)
    parts = [by_mesh(t.to(dtype), ptr, lengths) for t in (evecs, x * mass[:, None])]
    return torch.stack([basis.mT @ weighted for basis, weighted in zip(*parts, strict=True)])[: len(ptr) - 1]


def diffuse(spectrum: Tensor, evals: Tensor, time: Tensor) -> Tensor:
    """D = exp(−λ tᵀ) ∘ S"""
    return torch.exp(-evals[..., None] * time) * spectrum


def from_spectral(coefficients: Tensor, evecs: Tensor, ptr: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
    """Φ D of each mesh, in the dtype of the evecs: (V, C)"""
    dtype = promoted_dtype(coefficients, evecs)
    meshes = coefficients.to(dtype) if len(coefficients) else coefficients.new_zeros(1, *coefficients.shape[1:])
    parts = [basis @ d for basis, d in zip(by_mesh(evecs.to(dtype), ptr, lengths), meshes, strict=True)]
    return _rounded(parts[0] if len(parts) == 1 else torch.cat(parts), evecs, coefficients)


def spmm(rows: Tensor, columns: Tensor, size: int, values: Tensor, x: Tensor) -> Tensor:
    """A x for values (…, nnz) of A at these rows and columns (nnz,), and x (…, N, C): (…, size, C).

    Low precision is added up in float32, integers in int64.
    """
    dtype = _sum_dtype(values)
    products = values.to(dtype)[..., None] * x.to(dtype).index_select(-2, columns)
    sums = products.new_zeros(*products.shape[:-2], size, products.shape[-1])
    return sums.index_add(-2, rows.long(), products).to(values.dtype)  # ONNX adds by int64 only


def sddmm(rows: Tensor, columns: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A Bᵀ at these rows and columns (nnz,), for a (…, M, C) and b (…, N, C), added up as in `spmm`: (…, nnz)"""
    dtype = _sum_dtype(a)
    return (a.to(dtype).index_select(-2, rows) * b.to(dtype).index_select(-2, columns)).sum(-1).to(a.dtype)


def gradient_features(gradients: Tensor, a_re: Tensor, a_im: Tensor | None, swapped: bool = False) -> Tensor:
    """f = tanh(Re(ḡ ∘ b)) with b = A g, for gradients g = g_x + i g_y (2, V, C): (V, C)"""
    dtype = promoted_dtype(gradients, *matrices(a_re, a_im))
    (gx, gy), a_re = gradients.to(dtype), a_re.to(dtype)
    if a_im is None:
        bx, by = F.linear(gx, a_re), F.linear(gy, a_re)
    elif swapped:
        re, im = F.linear(gx, a_re), F.linear(gy, a_im.to(dtype))
        bx, by = re - im, re + im
    else:
        a_im = a_im.to(dtype)
        bx, by = F.linear(gx, a_re) - F.linear(gy, a_im), F.linear(gy, a_re) + F.linear(gx, a_im)
    return torch.tanh(gx * bx + gy * by)


def spectral_gradient_features(
    coefficients: Tensor,
    gradient_evecs: Tensor,
    a_re: Tensor,
    a_im: Tensor | None,
    ptr: Tensor,
    lengths: Sequence[int] | None = None,
    swapped: bool = False,
) -> Tensor:
    """The features of the gradients (G Φ) D, in the dtype of G Φ (2, V, K)."""
    gradients = torch.stack([from_spectral(coefficients, g, ptr, lengths) for g in gradient_evecs])
    features = gradient_features(gradients, a_re, a_im, swapped)
    return _rounded(features, gradient_evecs, *matrices(a_re, a_im))


def values_and_gradient_features(
    coefficients: Tensor,
    evecs: Tensor,
    gradient_evecs: Tensor,
    a_re: Tensor,
    a_im: Tensor | None,
    ptr: Tensor,
    lengths: Sequence[int] | None = None,
    swapped: bool = False,
) -> tuple[Tensor, Tensor]:
    """Φ D and its gradient features, in the promoted dtype of Φ and G Φ."""
    dtype = promoted_dtype(evecs, gradient_evecs)
    values = from_spectral(coefficients, evecs.to(dtype), ptr, lengths)
    rest = a_re, a_im, ptr, lengths, swapped
    return values, spectral_gradient_features(coefficients, gradient_evecs.to(dtype), *rest)


def mlp(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] | None = None,
    *,
    dropout: float = 0.0,
    residual: Tensor | None = None,
) -> Tensor:
    """residual + Wₙ a(… W₂ a(W₁ [x₁ … xₘ] + b₁) + b₂ …) + bₙ with a = dropout ∘ ReLU"""
    dtype = promoted_dtype(*inputs, *weights)
    x = torch.cat([each.to(dtype) for each in inputs], dim=-1)
    for i, weight in enumerate(weights):
        if i > 0:
            x = F.dropout(F.relu(x), dropout)
        x = F.linear(x, weight.to(dtype), None if biases is None else biases[i].to(dtype))
    if residual is None:
        return x
    return residual + x if residual.dtype == dtype else (residual + x).to(compute_dtype(*inputs, *weights))


def matrices(a_re: Tensor, a_im: Tensor | None) -> tuple[Tensor, ...]:
    """A_re and, with rotations, A_im."""
    return (a_re,) if a_im is None else (a_re, a_im)


def _sum_dtype(x: Tensor) -> torch.dtype:
    return sum_dtype(x) if x.is_floating_point() else torch.int64


def by_mesh(x: Tensor, ptr: Tensor, lengths: Sequence[int] | None) -> Sequence[Tensor]:
    """The rows of each mesh. A batch of no meshes is one mesh without rows here."""
    return [x] if len(ptr) <= 2 else torch.split(x, row_lengths(ptr, lengths))


def _rounded(out: Tensor, like: Tensor, *others: Tensor) -> Tensor:
    """Round a result to the dtype of one tensor, or to autocast's, if others have another dtype."""
    return out if all(other.dtype == like.dtype for other in others) else out.to(compute_dtype(like))
