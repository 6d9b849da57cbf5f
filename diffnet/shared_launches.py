"""Launches that the modules of a network share in a forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from diffnet.block import DiffusionNetBlock, Plan
from diffnet.diffusion import keep_nonnegative
from diffnet.ops import Backend
from diffnet.ops.common.backend import use_kernels
from diffnet.ops.common.compiler import under_transforms
from diffnet.ops.common.precision import compute_dtype, dot_precision
from diffnet.ops.mlp.op import new_seeds


def shared_launches(modules: Sequence[nn.Module], x: Tensor) -> list[Plan | None]:
    """Convert the weights of linear layers and blocks, set negative times to 0, and draw the seeds of dropout.

    Seeds take one launch, the rest another. Returns the plans of the modules, None for one that has to be called.

    Call it if all modules of the network are plain, because hooks may change parameters in between. A checkpointed
    block (`torch.utils.checkpoint`) is called and draws its seeds itself: it runs again with the state that the random
    generator had before the block.
    """
    from diffnet.ops.common.matmul import MAX_MATRICES, converted_together  # imports Triton

    plans: list[Plan | None] = []
    weights: list[list[Tensor]] = []
    times: list[Tensor | None] = []
    hidden: list[int] = []  # layers with dropout
    for module in modules:
        plan, own, dropout, time = None, list[Tensor](), 0.0, None
        if type(module) is nn.Linear:
            plan, own = Plan(), [module.weight]
        elif type(module) is DiffusionNetBlock:
            plan = module.plan()
            if plan.layers is not None:
                own, dropout = plan.layers[0], module.mlp.current_dropout()
            if plan.spectral and module.diffusion.training:
                time = module.diffusion.time
        plans.append(plan)
        weights.append(own if all(w.dtype == torch.float32 and _is_tensor(w, x.device) for w in own) else [])
        times.append(time if time is not None and _is_tensor(time, x.device) else None)
        hidden.append(len(own) - 1 if dropout > 0 else 0)
    matrices = [matrix for group in weights for matrix in group]
    dtype = compute_dtype(x, *matrices[:1])
    precision = dot_precision(matrices[0]) if matrices and dtype == torch.float32 else "ieee"
    if dtype == torch.float32 and precision == "ieee":
        weights, matrices = [[] for _ in modules], []
    clamped = [time for time in times if time is not None]
    together = bool(matrices) and len(clamped) <= MAX_MATRICES and all(map(_is_float32_vector, clamped))
    if not together:
        keep_nonnegative(clamped)
    converted = iter(converted_together(matrices, dtype, precision, clamped if together else ()))
    seeds = new_seeds(sum(hidden), x.device).split_with_sizes(hidden) if any(hidden) else [None] * len(modules)
    return [
        plan and plan._replace(matrices=[next(converted) for _ in own], seeds=s, clamped=time is not None)
        for plan, own, s, time in zip(plans, weights, seeds, times, strict=True)
    ]


def shares_launches(backend: Backend, x: Tensor) -> bool:
    """Whether a network launches kernels, so that `shared_launches` saves some."""
    if torch.compiler.is_compiling() or under_transforms() or type(x) is not Tensor or x.is_meta:
        return False
    return use_kernels(backend, x, matrix=True)


def _is_float32_vector(time: Tensor) -> bool:
    return time.dtype == torch.float32 and time.is_contiguous()


def _is_tensor(parameter: Tensor, device: torch.device) -> bool:
    """Whether a kernel on this device may read a parameter."""
    return type(parameter) in (nn.Parameter, Tensor) and parameter.device == device
