"""Triton kernel of the update of Adam.

PyTorch's kernels give a program 65,536 elements of a tensor, so most of the GPU is idle for networks of about a million
weights. Here a program has 1,024.
"""

from __future__ import annotations

import math
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffnet.ops.adam.reference import AdamOptions, AdamTensors
from diffnet.ops.common.launcher import launched
from diffnet.ops.common.tiling import cdiv

BLOCK = 1024  # elements of a program
GROUP = tl.constexpr(8)  # tensors
MAX_TENSORS = 64  # of a launch, whose arguments take up to 4 KB


def adam(tensors: AdamTensors, rate: Tensor, options: AdamOptions) -> None:
    """Compute `adam_reference`. All tensors are contiguous float32 on one device."""
    torch._foreach_add_(tensors.steps, 1)
    decay = ("decoupled" if options.decoupled else "l2") if options.weight_decay else "none"
    beta1, beta2 = options.betas
    logs = [math.log(beta) if beta else -math.inf for beta in options.betas]
    for start in range(0, len(tensors.parameters), MAX_TENSORS):
        part = slice(start, start + MAX_TENSORS)
        sizes = tuple(p.numel() for p in tensors.parameters[part])
        firsts = tuple(accumulate((cdiv(size, BLOCK) for size in sizes), initial=0))
        if firsts[-1]:
            adam_forward_kernel[(firsts[-1],)](
                *(x and tuple(x[part]) for x in tensors), sizes, firsts, rate, 1 - beta1, logs[0], 1 - beta2, logs[1],
                float(options.eps), float(options.weight_decay), 1 - options.average_decay,
                DECAY=decay, BLOCK=BLOCK, num_warps=4,
            )  # fmt: skip
    # As after an operation of PyTorch, autograd refuses to differentiate by values from before.
    torch.autograd.graph.increment_version([*tensors.parameters, *tensors.means, *tensors.squares])


@triton.jit
def _bias_correction(log_beta, step):
    """Return 1 − β^step. Where it is small, the difference would cancel digits, so a series is summed."""
    x = log_beta * step
    series = 0.0
    for i in tl.static_range(10):
        series = x * (1.0 / (10 - i)) * (1.0 + series)
    return tl.where(x > -1.0, -series, 1.0 - tl.exp(x))


@launched
@triton.jit
def adam_forward_kernel(
    parameters, grads, means, squares, steps, averages, sizes, firsts, rate,
    mean_rate, mean_log_beta, square_rate, square_log_beta, eps, weight_decay, average_rate,
    DECAY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update the elements of one program. `firsts` has the first program of each tensor, and the number of all.

    A program looks for its tensor in one group of GROUP tensors and skips the others, which takes fewer instructions.
    """
    program = tl.program_id(0)
    parameter, grad, mean, square, step = parameters[0], grads[0], means[0], squares[0], steps[0]
    average = parameter if averages is None else averages[0]
    size, first = tl.full((), 0, tl.int64), program
    for group in tl.static_range(0, len(sizes), GROUP):
        if (program >= firsts[group]) & (program < firsts[min(group + GROUP, len(sizes))]):
            for i in tl.static_range(group, min(group + GROUP, len(sizes))):
                is_reached = program >= firsts[i]
                parameter = tl.where(is_reached, parameters[i], parameter)
                grad = tl.where(is_reached, grads[i], grad)
                mean = tl.where(is_reached, means[i], mean)
                square = tl.where(is_reached, squares[i], square)
                step = tl.where(is_reached, steps[i], step)
                if averages is not None:
                    average = tl.where(is_reached, averages[i], average)
                size = tl.where(is_reached, sizes[i], size)
                first = tl.where(is_reached, firsts[i], first)
    at = (program - first).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    p = tl.load(parameter + at, mask=inside)
    g = tl.load(grad + at, mask=inside)
    m = tl.load(mean + at, mask=inside)
    v = tl.load(square + at, mask=inside)
    t, learning_rate = tl.load(step), tl.load(rate)
    factor = learning_rate / _bias_correction(mean_log_beta, t)
    scale = 1.0 / tl.sqrt_rn(_bias_correction(square_log_beta, t))
    if DECAY == "l2":
        g += weight_decay * p
    elif DECAY == "decoupled":
        p -= learning_rate * weight_decay * p
    m += mean_rate * (g - m)
    v += square_rate * (g * g - v)
    p -= factor * m / (tl.sqrt_rn(v) * scale + eps)
    tl.store(mean + at, m, mask=inside)
    tl.store(square + at, v, mask=inside)
    tl.store(parameter + at, p, mask=inside)
    if averages is not None:
        a = tl.load(average + at, mask=inside)
        tl.store(average + at, a + average_rate * (p - a), mask=inside)
