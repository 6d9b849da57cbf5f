"""How long a launch takes on the CPU: through `LaunchedKernel`, and through Triton's own search. Needs a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from diffnet.ops.mlp.op import mlp

LAUNCHES = 2000


def microseconds(launch: Callable[[], Any]) -> float:
    for _ in range(20):
        launch()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(LAUNCHES):
        launch()
    return 1e6 * (time.perf_counter() - start) / LAUNCHES


def main() -> None:
    from diffnet.ops.mlp import kernels

    recorded: list[tuple[Any, Any, Any]] = []

    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *arguments, **options: recorded.append((grid, arguments, options))

    x = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16)
    weights = [torch.randn(128, n * 128, device="cuda") for n in (3, 1, 1)]
    biases = [torch.randn(128, device="cuda") for _ in weights]
    own = kernels.mlp_forward_kernel
    kernels.mlp_forward_kernel = Recorder(own)
    with torch.autocast("cuda", torch.bfloat16):
        mlp([x, x, x], weights, biases, dropout=0.5, residual=x)
    ((grid, arguments, options),) = recorded
    for name, kernel in (("LaunchedKernel", own), ("Triton", own.kernel)):
        print(f"{name}: {microseconds(lambda kernel=kernel: kernel[grid](*arguments, **options)):.1f} µs")


if __name__ == "__main__":
    main()
