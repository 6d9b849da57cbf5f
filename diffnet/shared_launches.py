"""Launches that all layers and blocks of a network share, and the compilation of its kernels before its first call."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from itertools import islice
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from diffnet.arguments import has_plain_modules, is_plain
from diffnet.block import DiffusionNetBlock
from diffnet.diffusion import LearnedTimeDiffusion, keep_nonnegative
from diffnet.geometry import Operators
from diffnet.mlp import MLP
from diffnet.ops import Backend
from diffnet.ops.common.backend import use_kernels
from diffnet.ops.common.compiler import under_transforms
from diffnet.ops.common.cuda_graph import NotCapturable, is_recorded
from diffnet.ops.common.launcher import compile_ahead, compiles_only
from diffnet.ops.common.precision import allows_tf32, compute_dtype, dot_precision
from diffnet.ops.mlp.op import Shared, new_seeds

# For each network, the states in which it was called. A state decides which kernels are launched.
_called: WeakKeyDictionary[nn.Module, set[Hashable]] = WeakKeyDictionary()


def shared_launches(
    network: nn.Module,
    modules: Sequence[nn.Module],
    backend: Backend,
    x: Tensor,
    operators: Operators,
    *further: Tensor,
) -> list[dict[str, Shared]]:
    """Return the further keyword arguments of each layer and block of a network.

    Where kernels compute, three launches convert all weights, set negative times to 0, and draw the seeds of dropout.
    There are none if a module of the network isn't plain, because hooks may change parameters in between.
    """
    nothing: list[dict[str, Shared]] = [{} for _ in modules]
    if torch.compiler.is_compiling() or under_transforms() or type(x) is not Tensor or x.is_meta:
        return nothing
    if not use_kernels(backend, x, matrix=True):
        return nothing
    compile_before_first_call(network, x, operators, *further)
    if not has_plain_modules(network):
        return nothing
    from diffnet.ops.common.matmul import operands  # imports Triton

    weights = [_weights(module) for module in modules]
    matrices, converted = [matrix for each in weights for matrix in each], list[Tensor]()
    if matrices and all(matrix.dtype == torch.float32 and matrix.device == x.device for matrix in matrices):
        dtype = compute_dtype(x, matrices[0])
        converted = operands(matrices, dtype, dot_precision(matrices[0]) if dtype == torch.float32 else "ieee")
    diffusions = [module.diffusion for module in modules if isinstance(module, DiffusionNetBlock)]
    keep_nonnegative([d.time for d in diffusions if d.training and type(d) is LearnedTimeDiffusion])
    draws = [isinstance(module, DiffusionNetBlock) and module.draws_numbers() for module in modules]
    hidden = [len(each) - 1 if each and draw else 0 for each, draw in zip(weights, draws, strict=True)]
    seeds = new_seeds(sum(hidden), x.device).split_with_sizes(hidden) if any(hidden) else [None] * len(modules)
    rest = iter(converted)
    shares = [Shared(list(islice(rest, len(each))), s, True) for each, s in zip(weights, seeds, strict=True)]
    takes = [is_plain(module, nn.Linear) or is_plain(module, DiffusionNetBlock) for module in modules]
    return [{"shared": share} if take else {} for share, take in zip(shares, takes, strict=True)]


def _weights(module: nn.Module) -> list[Tensor]:
    """The weights of a plain layer, or of the MLP of a plain block."""
    if is_plain(module, nn.Linear):
        return [module.weight]
    parameters = (
        module.mlp.plain_parameters() if is_plain(module, DiffusionNetBlock) and type(module.mlp) is MLP else None
    )
    return [] if parameters is None else parameters[0]


def compile_before_first_call(network: nn.Module, features: Tensor, operators: Operators, *further: Tensor) -> None:
    """Compile all kernels of a step at the same time, if this is the first call of its kind on a GPU.

    further: more arguments of the network

    Without it, each launch of the first step would wait for its own compilation. Networks with hooks or other changed
    modules are left out, because hooks would see values that mean nothing.
    """
    if not features.is_cuda:
        return
    kind = _kind(network, features, operators)
    called = _called.setdefault(network, set())
    if kind in called:
        return
    called.add(kind)
    if not compiles_only() and not is_recorded() and has_plain_modules(network):
        _compile(network, features, operators, *further)


def _kind(network: nn.Module, features: Tensor, operators: Operators) -> Hashable:
    return (
        network.training,
        torch.is_grad_enabled(),
        features.requires_grad,
        features.dtype,
        features.device,
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        allows_tf32(),
        operators.k,
    )


def _compile(network: nn.Module, features: Tensor, operators: Operators, *further: Tensor) -> None:
    from diffnet.cuda_graphs.recording import Replica, forked_random_numbers, trial

    # The call itself says what is wrong, if anything.
    with suppress(NotCapturable, torch.OutOfMemoryError), forked_random_numbers(features.device), trial():
        replica = Replica(network, copies_buffers=True)
        leaf = features.detach().requires_grad_(features.requires_grad and torch.is_grad_enabled())
        compile_ahead(lambda: replica(leaf, operators, *further), [leaf, *replica.parameters])
