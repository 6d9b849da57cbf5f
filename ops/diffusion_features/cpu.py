"""Diffusion and the gradient features of its result on a CPU, with sparse gradients, in few products of dense matrices.

With the complex matrices G = G_X + i G_Y and A = A_re + i A_im, b = g Aᵀ is computed as G (x_d Aᵀ), and the backward
applies the adjoint Gᴴ before it multiplies with Φᵀ. docs/kernels.md derives this. Large products of dense matrices have
the dtype of Φ, and everything else is float32. Second derivatives are those of the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from diffnet.ops.common.cpu import (
    add_product,
    derivatives,
    keep_freed_memory,
    largest_chunk,
    row_chunks,
    tanh_,
    write_product,
)
from diffnet.ops.common.precision import in_dtype, without_autocast
from diffnet.ops.common.ragged import row_offsets
from diffnet.ops.diffusion_features import reference
from diffnet.ops.diffusion_features.complex_entries import complex_entries
from diffnet.ops.sparse.csr import csr_chunks, csr_product
from diffnet.ops.sparse.pattern import Pattern


class SparseOperators:
    """The operators of a batch: mass (V,), evals (B, K), evecs (V, K), pattern (V, V) and gradient (2, nnz).

    chunks: slices of the vertices of one mesh, and the number of the mesh
    """

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
        self.chunks = [
            (mesh, slice(first + rows.start, first + rows.stop))
            for mesh, (first, length) in enumerate(zip(row_offsets(lengths), lengths, strict=True))
            for rows in row_chunks(length)
        ]


def sparse_diffusion_and_gradient_features(
    x: Tensor, time: Tensor, a_re: Tensor, a_im: Tensor, operators: SparseOperators
) -> tuple[Tensor, Tensor, Tensor]:
    """x, and x_d and f in the dtype of Φ. They are differentiable in x, time and A."""
    keep_freed_memory()
    with without_autocast(x):
        if torch.is_grad_enabled() and any(t.requires_grad for t in (x, time, a_re, a_im)):
            out: tuple[Tensor, Tensor, Tensor] = _DiffusionFeatures.apply(  # type: ignore[no-untyped-call]
                x, time, a_re, a_im, operators
            )
            return out
        diffused = _diffused(x, time, operators)[0]
        return x, diffused, _features(diffused, a_re, a_im, operators, None)


class _DiffusionFeatures(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, time: Tensor, a_re: Tensor, a_im: Tensor, operators: SparseOperators
    ) -> tuple[Tensor, Tensor, Tensor]:
        diffused, decay, coefficients = _diffused(x, time, operators)
        parts: list[Tensor] = []
        features = _features(diffused, a_re, a_im, operators, parts)
        ctx.operators = operators
        ctx.save_for_backward(x, time, a_re, a_im, decay, coefficients, features, *parts)
        ctx.set_materialize_grads(False)
        return x, diffused, features

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        o: SparseOperators = ctx.operators
        x, time, a_re, a_im, decay, coefficients, features, *parts = ctx.saved_tensors
        passed_grad, diffused_grad, features_grad = grads
        diffused_grad = torch.zeros_like(features) if diffused_grad is None else diffused_grad
        features_grad = torch.zeros_like(features) if features_grad is None else features_grad
        if torch.is_grad_enabled():  # the derivative will be differentiated
            tensors = [x, time, a_re, a_im]
            found = derivatives(partial(_plain, o), tensors, ctx.needs_input_grad[:4], diffused_grad, features_grad)
            if passed_grad is not None and found[0] is not None:
                found[0] = found[0] + passed_grad
            return *found, None
        with without_autocast(x):
            inner = _inner_gradients(features_grad, features, parts)
            d_grad, re, im = _adjoint_sums(inner, diffused_grad, o).flatten(1, 2)
            d = coefficients.flatten(0, 1)
            d_grad.addmm_(re, a_re).addmm_(im, a_im)
            time_grad = -(o.evals.flatten() @ (d_grad * d)) * (time >= 0)
            x_grad = None
            if ctx.needs_input_grad[0]:
                x_grad = _from_spectrum(decay * d_grad.view_as(decay), o, passed_grad, x.dtype)
            return x_grad, time_grad, re.mT @ d, im.mT @ d, None


def _diffused(x: Tensor, time: Tensor, o: SparseOperators) -> tuple[Tensor, Tensor, Tensor]:
    """x_d (V, C), exp(−λ tᵀ) and D (B, K, C)"""
    decay = torch.exp(o.evals[..., None] * time.clamp(min=0).neg())
    d = torch.zeros_like(decay)
    for mesh, rows in o.chunks:
        add_product(d[mesh], o.evecs[rows].mT, in_dtype(x[rows] * o.mass[rows, None], o.evecs.dtype))
    d *= decay
    factors = in_dtype(d, o.evecs.dtype)
    diffused = o.evecs.new_empty(x.shape)
    for mesh, rows in o.chunks:
        torch.mm(o.evecs[rows], factors[mesh], out=diffused[rows])
    return diffused, decay, d


def _features(diffused: Tensor, a_re: Tensor, a_im: Tensor, o: SparseOperators, parts: list[Tensor] | None) -> Tensor:
    """The features (V, C). g_x, g_y, b_x and b_y of each chunk of vertices are appended to `parts`."""
    pattern, (gx, gy) = o.pattern, o.gradient
    turned = a_re.new_empty(2, *diffused.shape)
    for a, out in zip((a_re, a_im), turned, strict=True):
        write_product(diffused, in_dtype(a, diffused.dtype).mT, out)
    turned, table = turned.flatten(0, 1), in_dtype(diffused, gx.dtype)
    pairs, real, imaginary = complex_entries(pattern, o.gradient, adjoint=False)
    features = torch.empty_like(diffused)
    for rows, entries, starts in csr_chunks(pattern.indptr, list(row_chunks(len(diffused)))):
        twice, ends, near = slice(2 * entries.start, 2 * entries.stop), 2 * starts, pattern.indices[entries]
        g = [csr_product(starts, near, values[entries], table) for values in (gx, gy)]
        b = [csr_product(ends, pairs[twice], values[twice], turned) for values in (real, imaginary)]
        products = torch.mul(g[0], b[0]).addcmul_(g[1], b[1])
        tanh_(products)
        features[rows] = products
        if parts is not None:
            parts += g + b
    return features


def _inner_gradients(grad: Tensor, features: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """ds ∘ b and ds ∘ g, each with real and imaginary parts: (4, V, C) float32"""
    inner = torch.empty(4, *grad.shape)
    scratch = torch.empty(largest_chunk(len(grad)), grad.shape[1])
    for i, rows in enumerate(row_chunks(len(grad))):
        ds = scratch[: rows.stop - rows.start]
        f = in_dtype(features[rows], ds.dtype)
        torch.ops.aten.tanh_backward.grad_input(in_dtype(grad[rows], ds.dtype), f, grad_input=ds)
        gx, gy, bx, by = parts[4 * i : 4 * i + 4]
        for out, factor in zip(inner[:, rows], (bx, by, gx, gy), strict=True):
            torch.mul(ds, factor, out=out)
    return inner


def _adjoint_sums(inner: Tensor, diffused_grad: Tensor, o: SparseOperators) -> Tensor:
    """Φᵀ (dx_d + Re Gᴴ (ds ∘ b)), Re(Y) and Im(Y): (3, B, K, C) float32"""
    pairs, real, imaginary = complex_entries(o.pattern, o.gradient, adjoint=True)
    of_b, of_g = inner[:2].flatten(0, 1), inner[2:].flatten(0, 1)
    sums = inner.new_zeros(3, *o.evals.shape, inner.shape[2])
    entries_of_rows = csr_chunks(2 * o.pattern.transpose[0].indptr, [rows for _, rows in o.chunks])
    for (mesh, _), (rows, entries, starts) in zip(o.chunks, entries_of_rows, strict=True):
        basis, near = o.evecs[rows].mT, pairs[entries]
        products = [
            csr_product(starts, near, real[entries], of_b).add_(diffused_grad[rows]),
            csr_product(starts, near, real[entries], of_g),
            csr_product(starts, near, imaginary[entries], of_g),
        ]
        for total, product in zip(sums[:, mesh], products, strict=True):
            add_product(total, basis, in_dtype(product, basis.dtype))
    return sums


def _from_spectrum(spectrum_grad: Tensor, o: SparseOperators, added: Tensor | None, dtype: torch.dtype) -> Tensor:
    """m ∘ (Φ dS), plus `added`: (V, C)"""
    out = o.evecs.new_empty(len(o.evecs), spectrum_grad.shape[2], dtype=dtype)
    factors = in_dtype(spectrum_grad, o.evecs.dtype)
    for mesh, rows in o.chunks:
        product, mass = o.evecs[rows] @ factors[mesh], o.mass[rows, None]
        out[rows] = product * mass if added is None else torch.addcmul(added[rows], product, in_dtype(mass, dtype))
    return out


def _plain(o: SparseOperators, x: Tensor, time: Tensor, a_re: Tensor, a_im: Tensor) -> tuple[Tensor, ...]:
    return reference.sparse_diffusion_and_gradient_features(
        x, o.mass, o.evals, o.evecs, o.pattern, o.gradient, time, a_re, a_im, o.ptr, o.lengths
    )[1:]
