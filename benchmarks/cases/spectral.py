"""The projection onto the eigenbasis, and its gradient."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from diffnet.benchmarks.harness.peers import both_passes, compiled, leaf
from diffnet.benchmarks.harness.registry import Case, Options, benchmark
from diffnet.benchmarks.harness.sweep import sweep
from diffnet.benchmarks.original.network import original_to_spectral
from diffnet.ops import to_spectral


@benchmark("to-spectral", metrics=("GB/s",))
def to_spectral_cases(options: Options) -> Iterator[Case]:
    """S = Φᵀ(m ∘ x) of one mesh, and dx = m ∘ (Φ dS)."""
    device, k = options.device, options.k or 128
    for size in sweep(options, dtypes=("bf16", "tf32")):
        c, v, dtype = size.width, size.vertices, size.storage
        x = leaf(v, c, device=device, dtype=dtype)
        evecs = torch.randn(v, k, device=device).to(dtype)
        mass, ptr = torch.rand(v, device=device).to(dtype), torch.tensor([0, v], device=device)
        forwards = {
            "eager": partial(original_to_spectral, x, evecs, mass),
            "triton": partial(to_spectral, x, evecs, mass, ptr, backend="triton"),
        }
        if options.compile:
            forwards["compiled"] = partial(compiled(original_to_spectral), x, evecs, mass)
        # A copy of as many bytes shows the speed of the memory at this size.
        half, other = torch.empty(2, v, (k + c) // 2, device=device, dtype=dtype)
        for step, peers in both_passes(device, forwards, [x]):
            moved = float(size.kind.bytes * v * (k + c) + 4 * v + 4 * k * c)
            yield Case(
                {"pass": step, **size.parameters(k=k)},
                {**peers, "copy": partial(half.copy_, other)},
                flops=2.0 * v * k * c,
                bytes=moved,
                design_bytes={"triton": moved},
                kind=size.kind,
            )
