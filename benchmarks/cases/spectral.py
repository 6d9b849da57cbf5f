"""Projecting onto the basis, and the way back."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from diffnet.benchmarks.harness.arithmetic import arithmetic, matmul_precision
from diffnet.benchmarks.harness.peers import backward_of, compiled, forget_compiled, leaf, on_kernels
from diffnet.benchmarks.harness.registry import Case, Options, benchmark
from diffnet.benchmarks.original.network import original_to_spectral
from diffnet.ops import to_spectral

VERTICES = (1_000, 10_000, 100_000, 524_288, 1_000_000)
WIDTHS = (64, 128, 256)


@benchmark("to-spectral", metrics=("GB/s",))
def to_spectral_cases(options: Options) -> Iterator[Case]:
    """S = Φᵀ(m ∘ x) of one mesh, and dx = m ∘ (Φ dS)."""
    device, k = options.device, options.k or 128
    for dtype in options.dtypes or ("bf16", "tf32"):
        kind = arithmetic(dtype)
        for c in options.widths or WIDTHS:
            for v in options.vertices or VERTICES:
                forget_compiled()
                x = leaf(v, c, device=device, dtype=kind.storage)
                evecs = torch.randn(v, k, device=device).to(kind.storage)
                mass, ptr = torch.rand(v, device=device).to(kind.storage), torch.tensor([0, v], device=device)
                eager = partial(original_to_spectral, x, evecs, mass)
                forwards = {"eager": eager, "triton": partial(to_spectral, x, evecs, mass, ptr, backend="triton")}
                if options.compile:
                    forwards["compiled"] = partial(compiled(original_to_spectral), x, evecs, mass)
                # As many bytes to and fro: what the memory can do at that size.
                half, other = torch.empty(2, v, (k + c) // 2, device=device, dtype=kind.storage)
                flops, moved = 2.0 * v * k * c, float(kind.bytes * v * (k + c) + 4 * v + 4 * k * c)
                for step in ("forward", "backward"):
                    peers = {n: f if step == "forward" else backward_of(f, [x]) for n, f in forwards.items()}
                    peers["copy"] = partial(half.copy_, other)
                    peers["triton"] = on_kernels(device, peers["triton"])
                    with matmul_precision(kind.tf32):
                        yield Case(
                            {"pass": step, "dtype": dtype, "k": k, "width": c, "vertices": v},
                            peers,
                            flops=flops,
                            bytes=moved,
                            kind=kind,
                        )
