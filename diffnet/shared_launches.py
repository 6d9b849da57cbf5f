"""Launches that the modules of a network share in a forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from diffnet.arguments import is_plain
from diffnet.block import DiffusionNetBlock, Shared
from diffnet.diffusion import LearnedTimeDiffusion, keep_nonnegative
from diffnet.mlp import MLP
from diffnet.ops import Backend
from diffnet.ops.common.backend import use_kernels
from diffnet.ops.common.compiler import under_transforms
from diffnet.ops.common.precision import compute_dtype, dot_precision
from diffnet.ops.mlp.op import new_seeds


def shared_launches(modules: Sequence[nn.Module], x: Tensor) -> list[Shared]:
    """Convert the weights of linear layers and blocks, set negative times to 0, and draw the seeds of dropout.

    Seeds take one launch, the rest another. A module that has to be called does all of this itself, because hooks may
    change its parameters. So does a checkpointed block (`torch.utils.checkpoint`): it runs again with the state that
    the random generator had before the block, and has to draw the same seeds.
    """
    from diffnet.ops.common.matmul import MAX_MATRICES, converted_together  # imports Triton

    weights: list[list[Tensor]] = []
    times: list[Tensor | None] = []
    hidden: list[int] = []  # layers with dropout
    for module in modules:
        own: list[Tensor] = []
        time, dropout = None, 0.0
        if is_plain(module, nn.Linear):
            own = [module.weight]
        elif is_plain(module, DiffusionNetBlock):
            mlp, diffusion = module.mlp, module.diffusion
            parameters = mlp.plain_parameters() if is_plain(mlp, MLP) else None
            if parameters is not None:
                own, dropout = parameters[0], mlp.current_dropout()
            if diffusion.training and is_plain(diffusion, LearnedTimeDiffusion):
                time = diffusion.time
        weights.append(own if all(w.dtype == torch.float32 and _is_tracked(w, x.device) for w in own) else [])
        times.append(time if time is not None and _is_tracked(time, x.device) else None)
        hidden.append(len(own) - 1 if dropout > 0 else 0)
    matrices = [matrix for group in weights for matrix in group]
    dtype = compute_dtype(x, *matrices[:1])
    precision = dot_precision(matrices[0]) if matrices and dtype == torch.float32 else "ieee"
    if dtype == torch.float32 and precision == "ieee":
        weights = [[] for _ in modules]
    clamped = [time for time in times if time is not None]
    together = any(weights) and len(clamped) <= MAX_MATRICES and all(map(_is_float32_vector, clamped))
    if not together:
        keep_nonnegative(clamped)
    converted = converted_together(weights, dtype, precision, clamped if together else ())
    seeds = new_seeds(sum(hidden), x.device).split_with_sizes(hidden) if any(hidden) else [None] * len(modules)
    return [Shared(c, s, t is not None) for c, s, t in zip(converted, seeds, times, strict=True)]


def shares_launches(backend: Backend, x: Tensor) -> bool:
    """Whether a network launches kernels, so that `shared_launches` saves some."""
    if torch.compiler.is_compiling() or under_transforms() or type(x) is not Tensor or x.is_meta:
        return False
    return use_kernels(backend, x, matrix=True)


def _is_float32_vector(time: Tensor) -> bool:
    return time.dtype == torch.float32 and time.is_contiguous()


def _is_tracked(parameter: Tensor, device: torch.device) -> bool:
    """Whether a kernel may read a parameter, and PyTorch counts its changes."""
    plain = type(parameter) is nn.Parameter or type(parameter) is Tensor
    return plain and parameter.device == device and not parameter.is_inference()
