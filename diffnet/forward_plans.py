"""How a forward pass computes the modules of a network, and the launches that they share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice

import torch
from torch import Tensor, nn

from diffnet.arguments import is_plain
from diffnet.block import DiffusionNetBlock, Plan
from diffnet.diffusion import LearnedTimeDiffusion, keep_nonnegative
from diffnet.ops import Backend
from diffnet.ops.common.backend import use_kernels
from diffnet.ops.common.compiler import under_transforms
from diffnet.ops.common.precision import compute_dtype, dot_precision
from diffnet.ops.mlp.op import new_seeds


def plan_of(module: nn.Module) -> Plan | None:
    """Return how the next forward pass computes a layer or a block, None if it has to be called."""
    if is_plain(module, nn.Linear):
        return Plan(layers=([module.weight], [] if module.bias is None else [module.bias]))
    return module.plan() if is_plain(module, DiffusionNetBlock) else None


def shared_plans(modules: Sequence[nn.Module], x: Tensor) -> list[Plan | None]:
    """Return the plans of the modules. Convert all weights, set negative times to 0, and draw the seeds of dropout.

    This takes three launches. Call it if all modules of the network are plain, because hooks may change parameters in
    between. A checkpointed block (`torch.utils.checkpoint`) is called and draws its seeds itself: it runs again with
    the state that the random generator had before the block.
    """
    from diffnet.ops.common.matmul import operands  # imports Triton

    plans = [plan_of(module) for module in modules]
    weights = [[] if plan is None or plan.layers is None else plan.layers[0] for plan in plans]
    matrices, converted = list(chain.from_iterable(weights)), list[Tensor]()
    if matrices and all(matrix.dtype == torch.float32 and matrix.device == x.device for matrix in matrices):
        dtype = compute_dtype(x, matrices[0])
        converted = operands(matrices, dtype, dot_precision(matrices[0]) if dtype == torch.float32 else "ieee")
    diffusions = [module.diffusion for module in modules if isinstance(module, DiffusionNetBlock)]
    keep_nonnegative([d.time for d in diffusions if d.training and type(d) is LearnedTimeDiffusion])
    hidden = [
        len(own) - 1 if plan is not None and plan.dropout > 0 else 0 for own, plan in zip(weights, plans, strict=True)
    ]
    seeds = new_seeds(sum(hidden), x.device).split_with_sizes(hidden) if any(hidden) else [None] * len(modules)
    rest = iter(converted)
    return [
        plan and plan._replace(matrices=list(islice(rest, len(own))), seeds=s, clamped=True)
        for plan, own, s in zip(plans, weights, seeds, strict=True)
    ]


def shares_launches(backend: Backend, x: Tensor) -> bool:
    """Whether a network launches kernels, so that `shared_plans` saves some launches."""
    if torch.compiler.is_compiling() or under_transforms() or type(x) is not Tensor or x.is_meta:
        return False
    return use_kernels(backend, x, matrix=True)
