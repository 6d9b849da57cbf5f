"""Diffusion and the gradient features of its result on a CPU, with sparse gradients, in few products of dense matrices.

In complex numbers, with G = G_X + i G_Y, A = A_re + i A_im and x_d = Φ D, the features are f = tanh(Re(ḡ ∘ b)) with

    g = G x_d  and  b = g Aᵀ = G (x_d Aᵀ).

The last form has two real products of dense matrices instead of four, and a larger sparse product. The backward gains
more. With ds the gradient inside of tanh, and Y = Φᵀ Gᴴ (ds ∘ g),

    dD = Φᵀ (dx_d + Re Gᴴ (ds ∘ b)) + Re(Y) A_re + Im(Y) A_im
    dA_re = Re(Y)ᵀ D  and  dA_im = Im(Y)ᵀ D.

Only the products with Φᵀ have as many rows as vertices. Arguments are as in `ops.diffusion_features.sparse`, all in
float32. Second derivatives are those of the reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from diffnet.ops.common.cpu import derivatives, largest_chunk, row_chunks, tanh_
from diffnet.ops.common.ragged import row_offsets
from diffnet.ops.diffusion_features import reference
from diffnet.ops.sparse.cpu import csr_product, csr_row_chunks
from diffnet.ops.sparse.pattern import Pattern


def sparse_diffusion_and_gradient_features(
    x: Tensor,
    mass: Tensor,
    evals: Tensor,
    evecs: Tensor,
    pattern: Pattern,
    gradient: Tensor,
    time: Tensor,
    a_re: Tensor,
    a_im: Tensor,
    ptr: Tensor,
    lengths: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """x, x_d and f. They have gradients of x, time and A."""
    operators = _SparseOperators(mass, evals, evecs, pattern, gradient, ptr, lengths)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, time, a_re, a_im)):
        out: tuple[Tensor, Tensor, Tensor] = _DiffusionFeatures.apply(x, time, a_re, a_im, operators)  # type: ignore[no-untyped-call]
        return out
    diffused = _diffused(x, time, operators)[0]
    return x, diffused, _features(diffused, a_re, a_im, operators, None)


class _SparseOperators:
    """The operators of a batch, and its meshes as slices of the vertices."""

    def __init__(
        self,
        mass: Tensor,
        evals: Tensor,
        evecs: Tensor,
        pattern: Pattern,
        gradient: Tensor,
        ptr: Tensor,
        lengths: Sequence[int],
    ) -> None:
        self.mass, self.evals, self.evecs, self.pattern, self.gradient = mass, evals, evecs, pattern, gradient
        self.ptr, self.lengths = ptr, lengths

    def mesh_chunks(self) -> Iterator[tuple[int, slice]]:
        """Vertices of one mesh at a time, and the number of the mesh."""
        for mesh, (first, length) in enumerate(zip(row_offsets(self.lengths), self.lengths, strict=True)):
            for chunk in row_chunks(length):
                yield mesh, slice(first + chunk.start, first + chunk.stop)


class _DiffusionFeatures(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, time: Tensor, a_re: Tensor, a_im: Tensor, operators: _SparseOperators
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts: list[Tensor] = []
        diffused, decay, coefficients = _diffused(x, time, operators)
        features = _features(diffused, a_re, a_im, operators, parts)
        ctx.operators = operators
        ctx.save_for_backward(x, time, a_re, a_im, decay, coefficients, features, *parts)
        ctx.set_materialize_grads(False)
        return x, diffused, features

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        o: _SparseOperators = ctx.operators
        x, time, a_re, a_im, decay, coefficients, features, *parts = ctx.saved_tensors
        passed_grad, diffused_grad, features_grad = grads
        if torch.is_grad_enabled():  # the derivative will be differentiated
            raise NotImplementedError
        zeros = torch.zeros_like
        diffused_grad = zeros(features) if diffused_grad is None else diffused_grad
        features_grad = zeros(features) if features_grad is None else features_grad
        inner = _inner_gradients(features_grad, features, parts)
        d_grad, re, im = _adjoint_sums(inner, diffused_grad, o).flatten(1, 2)
        d = coefficients.flatten(0, 1)
        d_grad.addmm_(re, a_re).addmm_(im, a_im)
        time_grad = -(o.evals.flatten() @ (d_grad * d)) * (time >= 0)
        x_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = _from_spectrum(decay * d_grad.view_as(decay), o, passed_grad)
        return x_grad, time_grad, re.mT @ d, im.mT @ d, None


def _diffused(x: Tensor, time: Tensor, o: _SparseOperators) -> tuple[Tensor, Tensor, Tensor]:
    """x_d (V, C), exp(−λ tᵀ) and D (B, K, C)"""
    decay = torch.exp(-o.evals[..., None] * time.clamp(min=0))
    d = torch.zeros_like(decay)
    for mesh, rows in o.mesh_chunks():
        d[mesh].addmm_(o.evecs[rows].mT, x[rows] * o.mass[rows, None])
    d *= decay
    diffused = torch.empty_like(x, memory_format=torch.contiguous_format)
    for mesh, rows in o.mesh_chunks():
        torch.mm(o.evecs[rows], d[mesh], out=diffused[rows])
    return diffused, decay, d


def _features(
    diffused: Tensor, a_re: Tensor, a_im: Tensor, o: _SparseOperators, parts: list[Tensor] | None
) -> Tensor:
    """The features (V, C). g_x, g_y, b_x and b_y of each chunk of vertices are appended to `parts`."""
    pattern, (gx, gy) = o.pattern, o.gradient
    rotated = diffused.new_empty(2, *diffused.shape)
    for a, out in zip((a_re, a_im), rotated, strict=True):
        torch.mm(diffused, a.mT, out=out)
    rotated = rotated.flatten(0, 1)
    pairs, real, imaginary = _complex(pattern.indices, gx, gy, pattern.columns)
    features = torch.empty_like(diffused)
    for rows, entries, starts in csr_row_chunks(pattern.indptr):
        near, ends = pattern.indices[entries], 2 * starts
        own = [csr_product(starts, near, g[entries], diffused) for g in (gx, gy)]
        double = slice(2 * entries.start, None if entries.stop is None else 2 * entries.stop)
        turned = [csr_product(ends, pairs[double], g[double], rotated) for g in (real, imaginary)]
        tanh_(torch.mul(own[0], turned[0], out=features[rows]).addcmul_(own[1], turned[1]))
        if parts is not None:
            parts += own + turned
    return features


def _complex(indices: Tensor, real: Tensor, imaginary: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Entries of real matrices that multiply the real parts of a vector, followed by its imaginary parts.

    Returns the indices (2 nnz,), and the values of the matrix for the real part of the product and for the imaginary.
    """
    pairs = torch.stack([indices, indices + size], 1)
    return pairs.flatten(), torch.stack([real, -imaginary], 1).flatten(), torch.stack([imaginary, real], 1).flatten()


def _inner_gradients(grad: Tensor, features: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """ds ∘ b and ds ∘ g: (4, V, C), with real and imaginary parts"""
    inner = grad.new_empty(4, *grad.shape)
    scratch = grad.new_empty(largest_chunk(len(grad)), grad.shape[1])
    for i, rows in enumerate(row_chunks(len(grad))):
        ds = scratch[: rows.stop - rows.start]
        torch.ops.aten.tanh_backward.grad_input(grad[rows], features[rows], grad_input=ds)
        gx, gy, bx, by = parts[4 * i : 4 * i + 4]
        for out, factor in zip(inner[:, rows], (bx, by, gx, gy), strict=True):
            torch.mul(ds, factor, out=out)
    return inner


def _adjoint_sums(inner: Tensor, diffused_grad: Tensor, o: _SparseOperators) -> Tensor:
    """Φᵀ (dx_d + Re Gᴴ (ds ∘ b)), Re(Y) and Im(Y): (3, B, K, C)"""
    pattern, order = o.pattern.transpose
    gx, gy = o.gradient[:, order]
    pairs, real, imaginary = _complex(pattern.indices, gx, -gy, pattern.columns)
    of_b, of_g = inner[:2].flatten(0, 1), inner[2:].flatten(0, 1)
    sums = inner.new_zeros(3, *o.evals.shape, inner.shape[2])
    indptr = 2 * pattern.indptr
    bounds = [(mesh, rows) for mesh, rows in o.mesh_chunks()]
    entry = indptr[[rows.start for _, rows in bounds]].tolist()
    for (mesh, rows), first, last in zip(bounds, entry, [*entry[1:], None], strict=True):
        starts, entries = indptr[rows.start : rows.stop + 1] - first, slice(first, last)
        basis = o.evecs[rows].mT
        found = csr_product(starts, pairs[entries], real[entries], of_b).add_(diffused_grad[rows])
        sums[0, mesh].addmm_(basis, found)
        sums[1, mesh].addmm_(basis, csr_product(starts, pairs[entries], real[entries], of_g))
        sums[2, mesh].addmm_(basis, csr_product(starts, pairs[entries], imaginary[entries], of_g))
    return sums


def _from_spectrum(spectrum_grad: Tensor, o: _SparseOperators, added: Tensor | None) -> Tensor:
    """m ∘ (Φ dS), plus `added`: (V, C)"""
    out = o.evecs.new_empty(len(o.evecs), spectrum_grad.shape[2])
    scratch = out.new_empty(largest_chunk(len(out)), out.shape[1])
    for mesh, rows in o.mesh_chunks():
        values, mass = scratch[: rows.stop - rows.start], o.mass[rows, None]
        torch.mm(o.evecs[rows], spectrum_grad[mesh], out=values)
        if added is None:
            torch.mul(values, mass, out=out[rows])
        else:
            torch.addcmul(added[rows], values, mass, out=out[rows])
    return out
