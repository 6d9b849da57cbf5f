"""Spatial gradient features, on the basis and of given gradients."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from diffnet.benchmarks.cases.spectral import VERTICES, WIDTHS
from diffnet.benchmarks.harness.arithmetic import arithmetic, matmul_precision
from diffnet.benchmarks.harness.peers import backward_of, compiled, forget_compiled, leaf, on_kernels
from diffnet.benchmarks.harness.registry import Case, Options, benchmark
from diffnet.benchmarks.original.network import original_gradient_features
from diffnet.ops import gradient_features, spectral_gradient_features


def _on_basis(d: Tensor, gx_basis: Tensor, gy_basis: Tensor, a_re: Tensor, a_im: Tensor) -> Tensor:
    return original_gradient_features(gx_basis @ d, gy_basis @ d, a_re, a_im)


@benchmark("gradient-features", metrics=("TFLOP/s",))
def on_basis(options: Options) -> Iterator[Case]:
    """tanh(Re(ḡ ∘ A g)) with g = (GΦ) D on the basis, and the gradients of D and A."""
    device, k = options.device, options.k or 128
    for dtype in options.dtypes or ("bf16",):
        kind = arithmetic(dtype)
        for c in options.widths or WIDTHS:
            for v in options.vertices or VERTICES:
                forget_compiled()
                d = leaf(k, c, device=device, dtype=kind.storage)
                pushed = (torch.randn(2, v, k, device=device) * (k * k * c) ** -0.25).to(kind.storage)
                a_re, a_im = (leaf(c, c, device=device, dtype=kind.storage) for _ in range(2))
                ptr = torch.tensor([0, v], device=device)
                plain = (d, pushed[0], pushed[1], a_re, a_im)
                forwards = {
                    "eager": partial(_on_basis, *plain),
                    "triton": partial(spectral_gradient_features, d[None], pushed, a_re, a_im, ptr, backend="triton"),
                }
                if options.compile:
                    forwards["compiled"] = partial(compiled(_on_basis), *plain)
                # By the direct form, by the reassociated one that kernels compute, and the least of the two.
                direct = {"forward": 4 * k * c + 8 * c * c, "backward": 8 * k * c + 24 * c * c}
                executed = {"forward": 12 * k * c, "backward": 24 * k * c}
                moved = float(kind.bytes * v * (2 * k + c))
                for step in ("forward", "backward"):
                    peers = {
                        n: f if step == "forward" else backward_of(f, [d, a_re, a_im]) for n, f in forwards.items()
                    }
                    peers["triton"] = on_kernels(device, peers["triton"])
                    flops = float(v * direct[step])
                    with matmul_precision(kind.tf32):
                        yield Case(
                            {"pass": step, "dtype": dtype, "k": k, "width": c, "vertices": v},
                            peers,
                            flops=flops,
                            bytes=moved,
                            executed_flops={"triton": float(v * executed[step])},
                            kind=kind,
                        )


@benchmark("direct-gradient-features", metrics=("GB/s",))
def of_gradients(options: Options) -> Iterator[Case]:
    """tanh(Re(ḡ ∘ A g)) of given gradients g (2, V, C), and the gradients of g and A."""
    device = options.device
    for dtype in options.dtypes or ("bf16",):
        kind = arithmetic(dtype)
        for c in options.widths or WIDTHS:
            for v in options.vertices or VERTICES:
                forget_compiled()
                g = leaf(2, v, c, device=device, dtype=kind.storage, scale=c**-0.25)
                a_re, a_im = (leaf(c, c, device=device, dtype=kind.storage) for _ in range(2))
                forwards = {
                    "eager": partial(_of_gradients, g, a_re, a_im),
                    "triton": partial(gradient_features, g, a_re, a_im, backend="triton"),
                }
                if options.compile:
                    forwards["compiled"] = partial(compiled(_of_gradients), g, a_re, a_im)
                for step, flops, columns in (("forward", 8.0 * c * c, 3), ("backward", 24.0 * c * c, 5)):
                    peers = {
                        n: f if step == "forward" else backward_of(f, [g, a_re, a_im]) for n, f in forwards.items()
                    }
                    peers["triton"] = on_kernels(device, peers["triton"])
                    moved = float(kind.bytes * v * c * columns)
                    with matmul_precision(kind.tf32):
                        yield Case(
                            {"pass": step, "dtype": dtype, "width": c, "vertices": v},
                            peers,
                            flops=v * flops,
                            bytes=moved,
                            kind=kind,
                        )


def _of_gradients(g: Tensor, a_re: Tensor, a_im: Tensor) -> Tensor:
    return original_gradient_features(g[0], g[1], a_re, a_im)
