"""Spatial gradient features, on the basis and of given gradients."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from diffnet.benchmarks.harness.peers import both_passes, compiled, leaf
from diffnet.benchmarks.harness.registry import Case, Options, benchmark
from diffnet.benchmarks.harness.sweep import sweep
from diffnet.benchmarks.original.network import original_gradient_features
from diffnet.ops import gradient_features, spectral_gradient_features
from diffnet.ops.common.precision import dot_precision, part_count


@benchmark("gradient-features", metrics=("TFLOP/s",))
def on_basis(options: Options) -> Iterator[Case]:
    """tanh(Re(ḡ ∘ A g)) with g = (GΦ) D on the basis, and the gradients of D and A."""
    device, k = options.device, options.k or 128
    for size in sweep(options):
        c, v, dtype = size.width, size.vertices, size.storage
        d = leaf(k, c, device=device, dtype=dtype)
        gradient_evecs = (torch.randn(2, v, k, device=device) * (k * k * c) ** -0.25).to(dtype)
        a_re, a_im = (leaf(c, c, device=device, dtype=dtype) for _ in range(2))
        ptr = torch.tensor([0, v], device=device)
        plain = (d, gradient_evecs[0], gradient_evecs[1], a_re, a_im)
        forwards = {
            "eager": partial(_on_basis, *plain),
            "triton": partial(spectral_gradient_features, d[None], gradient_evecs, a_re, a_im, ptr, backend="triton"),
        }
        if options.compile:
            forwards["compiled"] = partial(compiled(_on_basis), *plain)
        # Operations per vertex of the direct form, and of the reassociated form that the kernels compute.
        direct = {"forward": 4 * k * c + 8 * c * c, "backward": 8 * k * c + 24 * c * c}
        executed = {"forward": 12 * k * c, "backward": 24 * k * c}
        fewest = float(size.kind.bytes * v * (2 * k + c))
        # For numbers in parts, a first kernel of the backward writes 16 bytes for each vertex and channel, and a second
        # one reads them and the gradients of the eigenvectors again.
        again = part_count(dot_precision(gradient_evecs)) > 1
        more = {"forward": 0.0, "backward": float(v * (32 * c + size.kind.bytes * 2 * k)) if again else 0.0}
        for step, peers in both_passes(device, forwards, [d, a_re, a_im]):
            yield Case(
                {"pass": step, **size.parameters(k=k)},
                peers,
                flops=float(v * direct[step]),
                bytes=fewest,
                design_bytes={"triton": fewest + more[step]},
                executed_flops={"triton": float(v * executed[step])},
                kind=size.kind,
            )


@benchmark("direct-gradient-features", metrics=("GB/s",))
def of_gradients(options: Options) -> Iterator[Case]:
    """tanh(Re(ḡ ∘ A g)) of given gradients g (2, V, C), and the gradients of g and A."""
    device = options.device
    for size in sweep(options):
        c, v, dtype = size.width, size.vertices, size.storage
        g = leaf(2, v, c, device=device, dtype=dtype, scale=c**-0.25)
        a_re, a_im = (leaf(c, c, device=device, dtype=dtype) for _ in range(2))
        forwards = {
            "eager": partial(_of_gradients, g, a_re, a_im),
            "triton": partial(gradient_features, g, a_re, a_im, backend="triton"),
        }
        if options.compile:
            forwards["compiled"] = partial(compiled(_of_gradients), g, a_re, a_im)
        work = {"forward": (8.0 * c * c, 3), "backward": (24.0 * c * c, 5)}
        for step, peers in both_passes(device, forwards, [g, a_re, a_im]):
            flops, columns = work[step]
            yield Case(
                {"pass": step, **size.parameters()},
                peers,
                flops=v * flops,
                bytes=float(size.kind.bytes * v * c * columns),
                kind=size.kind,
            )


def _on_basis(d: Tensor, gx_basis: Tensor, gy_basis: Tensor, a_re: Tensor, a_im: Tensor) -> Tensor:
    return original_gradient_features(gx_basis @ d, gy_basis @ d, a_re, a_im)


def _of_gradients(g: Tensor, a_re: Tensor, a_im: Tensor) -> Tensor:
    return original_gradient_features(g[0], g[1], a_re, a_im)
