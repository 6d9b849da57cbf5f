"""Spectral transforms."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from diffnet.benchmarks.arithmetic import arithmetic, floor_ms, matmul_precision
from diffnet.benchmarks.registry import Case, Options, benchmark
from diffnet.ops import to_spectral


@benchmark("to-spectral", metric="GB/s")
def to_spectral_cases(options: Options) -> Iterator[Case]:
    """S = Φᵀ(m ∘ x) of one mesh."""
    device, k = options.device, options.k or 128
    for dtype in options.dtypes or ("bf16", "tf32", "fp32"):
        kind = arithmetic(dtype)
        for c in options.widths or (64, 128, 256):
            for v in options.vertices or (1_000, 10_000, 100_000, 1_000_000):
                x, evecs = (torch.randn(v, n, device=device, dtype=kind.storage) for n in (c, k))
                mass, ptr = torch.rand(v, device=device, dtype=kind.storage), torch.tensor([0, v], device=device)
                flops, moved = 2.0 * v * k * c, float(kind.bytes * v * (k + c) + 4 * v + 4 * k * c)
                with matmul_precision(kind.tf32):
                    yield Case(
                        {"dtype": dtype, "k": k, "width": c, "vertices": v},
                        {"plain": partial(to_spectral, x, evecs, mass, ptr)},
                        flops=flops,
                        bytes=moved,
                        floor_ms=floor_ms(flops, moved, kind),
                    )
