"""Compile every kernel for a GPU that need not be there: what Triton's interpreter takes may still fail to compile.

The argument is the GPU's compute capability, 90 for 9.0. Run by test_kernel_compilation.py in a process of its own,
without the interpreter. Prints, for each kernel that was launched, its name, arithmetic and shared memory in bytes.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from no_gpu import compile_only
from torch import Tensor

from diffnet.ops.kernels import diffusion, direct_gradient_features, gradient_features, linear, spectral

CAPABILITY = int(sys.argv[1])
V, K, C = 1000, 128, 128


def launch_all(dtype: torch.dtype) -> None:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape).to(dtype)

    ptr, mass, d = torch.tensor([0, 400, V]), torch.rand(V), torch.randn(2, K, C)
    x, evecs, pushed, a = random(V, C), random(V, K), random(2, V, K), random(C, C)
    spectral.project(x, evecs, mass, ptr)
    diffusion.diffuse_backward(d, d, torch.rand(2, K), torch.rand(C))
    spectral.evaluate(d, evecs, mass, ptr)
    gradient_features.forward(d, d, d, evecs, pushed, ptr)
    gradient_features.backward(x, d, d, d, pushed, ptr)
    direct_gradient_features.forward(random(2, V, C), a, a)
    direct_gradient_features.pointwise_backward(x, random(2, V, C), a, a)
    linear.linear([x, x, x], random(C, 3 * C), torch.randn(C), None, True, 0.5, torch.randint(9, (2,)))
    linear.linear([x], a, torch.randn(C), x, False, 0.0, None)
    linear.activation_backward(x, x, 0.5)


def report(name: str, options: dict[str, Any], compiled: Any) -> None:
    print(name, options.get("PRECISION", ""), arithmetic, compiled.metadata.shared, flush=True)


compile_only(CAPABILITY, report)
for module in (diffusion, spectral, gradient_features, direct_gradient_features, linear):
    module.interpreted = lambda tensor: False
    module.roomy = lambda tensor: CAPABILITY == 90
    if hasattr(module, "processors"):
        module.processors = lambda tensor: 132
for arithmetic, dtype in (("bf16", torch.bfloat16), ("tf32", torch.float32)):
    torch.backends.cuda.matmul.fp32_precision = "tf32" if arithmetic == "tf32" else "ieee"
    launch_all(dtype)
