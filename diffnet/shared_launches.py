"""Launches that all blocks of a network share in a forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from diffnet.arguments import is_plain
from diffnet.block import DiffusionNetBlock
from diffnet.diffusion import LearnedTimeDiffusion, kept_nonnegative
from diffnet.mlp import MLP, drawn_together
from diffnet.ops import Backend
from diffnet.ops.common.backend import use_kernels
from diffnet.ops.common.compiler import under_transforms
from diffnet.ops.common.precision import compute_dtype, dot_precision


@contextmanager
def shared_launches(first: nn.Module, blocks: Iterable[nn.Module], last: nn.Module, x: Tensor) -> Iterator[None]:
    """Prepare the parameters of a network in one launch: convert all weights, and set negative times to 0.

    Blocks that run in this context use the results. Blocks that run elsewhere do both themselves, for example if a
    backward pass runs them again (`torch.utils.checkpoint`). Modules that have to be called read their parameters
    themselves, because hooks may change these.
    """
    from diffnet.ops.common.matmul import MOST_MATRICES, converted_together  # imports Triton

    layers, times = [layer for layer in (first, last) if is_plain(layer, nn.Linear)], []
    for block in blocks:
        if not is_plain(block, DiffusionNetBlock):
            continue
        mlp, diffusion = block.mlp, block.diffusion
        if is_plain(mlp, MLP):
            layers += mlp.plain_layers() or []
        if diffusion.training and is_plain(diffusion, LearnedTimeDiffusion):
            times.append(diffusion.time)
    device, weights = x.device, [layer.weight for layer in layers]
    weights = [w for w in weights if w.dtype == torch.float32 and _is_tracked(w, device)]
    times = [time for time in times if _is_tracked(time, device)]
    dtype = compute_dtype(x, *weights[:1])
    precision = dot_precision(weights[0]) if weights and dtype == torch.float32 else "ieee"
    if dtype == torch.float32 and precision == "ieee":
        weights = []
    together = bool(weights) and len(times) <= MOST_MATRICES and all(map(_is_float32_vector, times))
    converted = converted_together(weights, dtype, precision, clamped=times if together else ())
    with converted, kept_nonnegative(times, done=together):
        yield


@contextmanager
def shared_dropout_seeds(blocks: Iterable[nn.Module], device: torch.device) -> Iterator[None]:
    """Draw the seeds for the dropout of all blocks in one launch.

    A checkpoint (`torch.utils.checkpoint`) runs a block again with the state that the random generator had before the
    block. Such a block has to draw its own seeds, so it must not run in this context.
    """
    plain = [block for block in blocks if is_plain(block, DiffusionNetBlock)]
    with drawn_together([block.mlp for block in plain if block.plain_layers() is not None], device):
        yield


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
