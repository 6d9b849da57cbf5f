"""Compile every dense kernel for a GPU that need not be there. Code that the interpreter runs may still not compile.

The arguments are the GPU's compute capability, 90 for 9.0, and the arithmetic, bf16, tf32 or fp32.
test_kernel_compilation.py runs this in a process of its own, without the interpreter. It prints, for each launched
kernel, its name, the precision of its products and its shared memory in bytes.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from no_gpu import compile_only
from torch import Tensor

from diffnet.ops.common.matmul import operands
from diffnet.ops.common.precision import dot_precision
from diffnet.ops.common.spans import Unsummed
from diffnet.ops.cross_entropy import kernels as cross_entropy
from diffnet.ops.diffusion_features import kernels as diffusion_features
from diffnet.ops.functional_maps import kernels as functional_maps
from diffnet.ops.gradient_features import coefficient_kernels as coefficients
from diffnet.ops.gradient_features import direct_kernels as direct_gradient_features
from diffnet.ops.gradient_features import kernels as gradient_features
from diffnet.ops.mlp import kernels as mlp
from diffnet.ops.mlp import linear_kernels as linear
from diffnet.ops.mlp import weight_gradient_kernels as weight_gradients
from diffnet.ops.spectral import diffusion_kernels as diffusion
from diffnet.ops.spectral import kernels as spectral

CAPABILITY, ARITHMETIC = int(sys.argv[1]), sys.argv[2]
V, K, C = 1000, 128, 128


def launch_all(dtype: torch.dtype) -> None:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape).to(dtype)

    ptr, mass, d = torch.tensor([0, 400, V]), torch.rand(V), torch.randn(2, K, C)
    x, evecs, gradient_evecs, a = random(V, C), random(V, K), random(2, V, K), random(C, C)
    spectral.project(x, evecs, mass, ptr)
    diffusion.diffuse(d, torch.rand(2, K), torch.rand(C))
    diffusion.diffuse_backward(d, d, torch.rand(2, K), torch.rand(C))
    spectral.evaluate(d, evecs, mass, ptr)
    spectral.evaluate(d, evecs, mass, ptr, added=x)
    table = coefficients.table(d, torch.randn(C, C), torch.randn(C, C), evecs)
    gradient_features.forward(table, evecs, gradient_evecs, ptr)
    gradient_features.forward(table, evecs, gradient_evecs, ptr, swapped=True)
    gradient_features.backward(x, table, gradient_evecs, ptr, swapped=True)
    sums = gradient_features.backward(x, table, gradient_evecs, ptr, values_grad=x, evecs=evecs)
    matrix, evals, time = torch.randn(C, C), torch.rand(2, K), torch.rand(C)
    diffusion_features.sum_and_diffuse(*spectral.project_spans(x, evecs, mass, ptr), ptr, evals, time)
    total = Unsummed(torch.empty(1, 3, 100), torch.empty(100))
    gradient_features.backward(x, table, gradient_evecs, ptr, values_grad=x, evecs=evecs, unsummed=total)
    coefficients.backward(sums, d, matrix, matrix, (d, evals, time))
    for swapped in (False, True):
        direct_gradient_features.forward(random(2, V, C), a, a, swapped)
        direct_gradient_features.pointwise_backward(x, random(2, V, C), a, a, swapped)
    seed = torch.randint(9, (2,))
    wide, w = operands([torch.randn(C, 3 * C), torch.randn(C, C)], dtype, dot_precision(x))
    linear.linear([x, x, x], wide, torch.randn(C), activation=True, dropout=0.5, seed=seed)
    linear.linear([x], w, torch.randn(C), residual=x)
    linear.linear_backward(x, w, hidden=x, dropout=0.5)
    linear.inputs_backward(x, wide, 3, x)
    for c, dropout in ((32, 0.5), (64, 0.5), (128, 0.0), (128, 0.5)):
        inputs, weights = [random(V, c)] * 3, [random(c, 3 * c), random(c, c), random(c, c)]
        seeds = torch.randint(9, (2, 2)) if dropout else None
        weights = operands(weights, dtype, dot_precision(x))
        mlp.forward(inputs, weights, [torch.randn(c)] * 3, inputs[0], dropout, seeds, True)
        mlp.backward(inputs[0], inputs, weights, inputs[1:], True, dropout, True)
    for c in (64, C):
        layers = [random(V, c)] * 3, [random(V, c)] * 2, [random(V, c)] * 3
        weight_gradients.weight_gradients(*layers)
        projection = weight_gradients.Projection(random(V, c), random(V, c), ptr)
        weight_gradients.weight_gradients(*layers, projection=projection)
    logits, labels = random(V, 260), torch.randint(260, (V,))
    cross_entropy.cross_entropy(logits, labels, -1)
    cross_entropy.cross_entropy_backward(torch.randn(V), logits, labels, -1)
    functional_maps.inverse_factors(torch.randn(5, 40, 32, dtype=torch.float64))


def report(name: str, options: dict[str, Any], compiled: Any) -> None:
    print(name, options.get("PRECISION", ""), compiled.metadata.shared, flush=True)


compile_only(CAPABILITY, report)
for module in (
    coefficients,
    cross_entropy,
    diffusion,
    spectral,
    gradient_features,
    direct_gradient_features,
    linear,
    mlp,
    weight_gradients,
):
    module.interpreted = lambda tensor: False
    module.roomy = lambda tensor: CAPABILITY == 90
    if hasattr(module, "on_hopper"):
        module.on_hopper = lambda tensor: CAPABILITY == 90
    if hasattr(module, "processors"):
        module.processors = lambda tensor: 132
torch.backends.cuda.matmul.fp32_precision = "tf32" if ARITHMETIC == "tf32" else "ieee"
launch_all(torch.bfloat16 if ARITHMETIC == "bf16" else torch.float32)
