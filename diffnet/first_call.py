"""Compiles the kernels of a network in several threads before its first call on a GPU."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from diffnet.arguments import has_plain_modules
from diffnet.geometry import Operators
from diffnet.ops.common.cuda_graph import NotCapturable, is_recorded
from diffnet.ops.common.launcher import compile_ahead, compiles_only
from diffnet.ops.common.precision import allows_tf32

# For each network, the states in which it was called. A state decides which kernels are launched.
_called: WeakKeyDictionary[nn.Module, set[Hashable]] = WeakKeyDictionary()


def compile_before_first_call(network: nn.Module, features: Tensor, operators: Operators) -> None:
    """Compile all kernels of a step at the same time, if this is the first call of its kind on a GPU.

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
        _compile(network, features, operators)


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


def _compile(network: nn.Module, features: Tensor, operators: Operators) -> None:
    from diffnet.cuda_graphs.recording import forked_random_numbers, trial
    from diffnet.cuda_graphs.replica import Replica

    # The call itself says what is wrong, if anything.
    with suppress(NotCapturable, torch.OutOfMemoryError), forked_random_numbers(features.device), trial():
        replica = Replica(network, copies_buffers=True)
        leaf = features.detach().requires_grad_(features.requires_grad and torch.is_grad_enabled())
        compile_ahead(lambda: replica(leaf, operators), [leaf, *replica.parameters])
