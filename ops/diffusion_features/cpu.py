"""Diffusion and the gradient features of its result on a CPU, with sparse gradients, in few products of dense matrices.

With the complex matrices G = G_X + i G_Y and A = A_re + i A_im, b = g Aᵀ is computed as G (x_d Aᵀ), and the backward
applies the adjoint Gᴴ before it multiplies with Φᵀ. docs/kernels.md derives this. Large products of dense matrices have
the dtype of Φ, and everything else is float32. Second derivatives, and several gradients at once, are those of the
definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from diffnet.ops.common.compiler import is_batched
from diffnet.ops.common.cpu import add_product, keep_freed_memory, largest_chunk, row_chunks, tanh_, write_product
from diffnet.ops.common.dispatch import derivatives
from diffnet.ops.common.precision import in_dtype, without_autocast
from diffnet.ops.common.ragged import row_lengths, row_offsets
from diffnet.ops.definition import BlockArguments, diffusion_and_gradient_features
from diffnet.ops.sparse.csr import csr_chunks, csr_product


class _Operators:
    """The operators of a batch: mass (V,), evals (B, K), evecs (V, K), pattern (V, V) and gradient (2, nnz).

    chunks: slices of the vertices of one mesh, and the number of the mesh
    """

    def __init__(self, arguments: BlockArguments) -> None:
        assert arguments.pattern is not None
        self.arguments, self.pattern = arguments, arguments.pattern
        self.mass, self.evals, self.evecs, self.gradient = arguments[:4]
        lengths = row_lengths(arguments.ptr, arguments.lengths)
        self.chunks = [
            (mesh, slice(first + rows.start, first + rows.stop))
            for mesh, (first, length) in enumerate(zip(row_offsets(lengths), lengths, strict=True))
            for rows in row_chunks(length)
        ]


def diffused_with_features(x: Tensor, arguments: BlockArguments) -> tuple[Tensor, Tensor, Tensor]:
    """x, and x_d and f in the dtype of Φ. They are differentiable in x, time and A."""
    keep_freed_memory()
    time, a_re, a_im = arguments[4:7]
    assert a_im is not None
    operators = _Operators(arguments)
    with without_autocast(x):
        if torch.is_grad_enabled() and any(t.requires_grad for t in (x, time, a_re, a_im)):
            return _DiffusionFeatures.apply(x, time, a_re, a_im, operators)  # type: ignore[no-untyped-call]
        diffused = _diffused(x, time, operators)[0]
        return x, diffused, _features(diffused, a_re, a_im, operators, None)


class _DiffusionFeatures(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, time: Tensor, a_re: Tensor, a_im: Tensor, operators: _Operators
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
        o: _Operators = ctx.operators
        x, time, a_re, a_im, decay, coefficients, features, *parts = ctx.saved_tensors
        passed_grad, diffused_grad, features_grad = grads
        diffused_grad = torch.zeros_like(features) if diffused_grad is None else diffused_grad
        features_grad = torch.zeros_like(features) if features_grad is None else features_grad
        if torch.is_grad_enabled() or is_batched(diffused_grad, features_grad):
            # In place, nothing is differentiated or batched.
            tensors, needed = [x, time, a_re, a_im], ctx.needs_input_grad[:4]
            results = derivatives(partial(_plain, o), tensors, diffused_grad, features_grad, needed=needed)
            if passed_grad is not None and results[0] is not None:
                results[0] = results[0] + passed_grad
            return *results, None
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


def _diffused(x: Tensor, time: Tensor, o: _Operators) -> tuple[Tensor, Tensor, Tensor]:
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


def _features(diffused: Tensor, a_re: Tensor, a_im: Tensor, o: _Operators, parts: list[Tensor] | None) -> Tensor:
    """The features (V, C). g_x, g_y, b_x and b_y of each chunk of vertices are appended to `parts`."""
    pattern, (gx, gy) = o.pattern, o.gradient
    turned = a_re.new_empty(2, *diffused.shape)
    for a, out in zip((a_re, a_im), turned, strict=True):
        write_product(diffused, in_dtype(a, diffused.dtype).mT, out)
    turned, table = turned.flatten(0, 1), in_dtype(diffused, gx.dtype)
    pairs, real, imaginary = _pairs(pattern.indices, pattern.indices + len(table)), _pairs(gx, -gy), _pairs(gy, gx)
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


def _pairs(first: Tensor, second: Tensor) -> Tensor:
    """Numbers (nnz,) and (nnz,) in turn, (2 nnz,): each entry of a complex matrix is two of a real one."""
    return torch.stack([first, second], 1).flatten()


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


def _adjoint_sums(inner: Tensor, diffused_grad: Tensor, o: _Operators) -> Tensor:
    """Φᵀ (dx_d + Re Gᴴ (ds ∘ b)), Re(Y) and Im(Y): (3, B, K, C) float32"""
    pattern, order = o.pattern.transpose
    gx, gy = o.gradient[:, order]
    pairs, real = _pairs(pattern.indices, pattern.indices + inner.shape[1]), _pairs(gx, gy)
    imaginary = _pairs(-gy, gx)
    of_b, of_g = inner[:2].flatten(0, 1), inner[2:].flatten(0, 1)
    sums = inner.new_zeros(3, *o.evals.shape, inner.shape[2])
    entries_of_rows = csr_chunks(2 * pattern.indptr, [rows for _, rows in o.chunks])
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


def _from_spectrum(spectrum_grad: Tensor, o: _Operators, added: Tensor | None, dtype: torch.dtype) -> Tensor:
    """m ∘ (Φ dS), plus `added`: (V, C)"""
    out = o.evecs.new_empty(len(o.evecs), spectrum_grad.shape[2], dtype=dtype)
    factors = in_dtype(spectrum_grad, o.evecs.dtype)
    for mesh, rows in o.chunks:
        product, mass = o.evecs[rows] @ factors[mesh], o.mass[rows, None]
        out[rows] = product * mass if added is None else torch.addcmul(added[rows], product, in_dtype(mass, dtype))
    return out


def _plain(o: _Operators, x: Tensor, time: Tensor, a_re: Tensor, a_im: Tensor) -> tuple[Tensor, ...]:
    return diffusion_and_gradient_features(x, o.arguments._replace(time=time, a_re=a_re, a_im=a_im))
