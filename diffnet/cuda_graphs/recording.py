"""First runs of a copy of a network on buffers, which are recorded afterwards. They don't change the network."""

from __future__ import annotations

import copy
import random
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from diffnet.cuda_graphs.buffers import NotCounted
from diffnet.cuda_graphs.graphed_class import plain_class
from diffnet.cuda_graphs.module_state import CONTAINERS, GRAPHS, MACHINERY
from diffnet.ops.common.cuda_graph import NotCapturable


class Replica:
    """A network with the same submodules and attributes, and with stand-ins for its parameters.

    Other threads may call the network meanwhile. What a call sets stays in the replica.

    parameters: of the replica, in the order of `network.parameters()`: tensors with the same memory. The parameters
        themselves may belong to a graph of autograd that still lives, and a recording would have to wait for its
        stream.
    copies_buffers: whether the replica has buffers of its own. Otherwise a call changes those of the network.
    """

    def __init__(self, network: nn.Module, *, copies_buffers: bool) -> None:
        originals = list(network.parameters())
        self.parameters = [p.detach().requires_grad_(p.requires_grad) for p in originals]
        self._tensors = {id(p): stand_in for p, stand_in in zip(originals, self.parameters, strict=True)}
        self._copies_buffers = copies_buffers
        self._copies: dict[int, nn.Module] = {}
        self.network = self._copied(network)
        self._before = self._state()

    def _copied(self, module: nn.Module) -> nn.Module:
        if id(module) not in self._copies:
            if isinstance(module, torch.jit.ScriptModule):
                raise NotCapturable("a submodule is TorchScript")
            cls = plain_class(module)
            replica = self._copies[id(module)] = cls.__new__(cls)
            state = {n: copy.copy(v) if isinstance(v, CONTAINERS) else v for n, v in vars(module).items()}
            state["_parameters"] = {n: self._tensors.get(id(p), p) for n, p in module._parameters.items()}
            state["_buffers"] = {n: self._buffer(b) for n, b in module._buffers.items()}
            state["_modules"] = {n: m if m is None else self._copied(m) for n, m in module._modules.items()}
            state.pop(GRAPHS, None)
            replica.__dict__.update(state)
        return self._copies[id(module)]

    def _buffer(self, buffer: Tensor | None) -> Tensor | None:
        if buffer is None or not self._copies_buffers:
            return buffer
        if id(buffer) not in self._tensors:
            self._tensors[id(buffer)] = buffer.detach().clone()
        return self._tensors[id(buffer)]

    def __call__(self, features: Tensor, operators: Any, *further: Tensor) -> Any:
        """Call `forward` of the network's class, and none of the network's hooks, in the caller's autocast."""
        with without_cached_casts(features.device.type):
            return type(self.network).forward(self.network, features, operators, *further)

    def check_attributes(self) -> None:
        """Raise NotCapturable if calls have changed an attribute. A replayed graph would not."""
        after = self._state()
        for name in {**self._before, **after}:
            if self._before.get(name) != after.get(name):
                raise NotCapturable(f"its forward pass changes the attribute {name!r}")

    def _state(self) -> dict[str, Hashable]:
        """The identities of all attributes, by their names."""
        identities: dict[str, Hashable] = {}
        for prefix, module in self.network.named_modules():
            dot = prefix and f"{prefix}."
            for name, value in vars(module).items():
                if name in ("_parameters", "_buffers", "_modules"):
                    identities |= {f"{dot}{n}": id(v) for n, v in value.items()}
                elif name not in MACHINERY:
                    identities[f"{dot}{name}"] = _identity(value)
        return identities


def _identity(value: Any) -> Hashable:
    if isinstance(value, dict):
        return tuple(map(id, value.keys())), tuple(map(id, value.values()))
    return tuple(map(id, value)) if isinstance(value, CONTAINERS) else id(value)


def without_cached_casts(device: str) -> torch.autocast:
    """The caller's autocast without its cache of weights. A graph would read a cached cast forever."""
    enabled = torch.is_autocast_enabled(device)
    return torch.autocast(device, torch.get_autocast_dtype(device), enabled=enabled, cache_enabled=False)


def check_reads_only(out: Tensor, inputs: Sequence[Tensor]) -> None:
    """Raise NotCapturable if a tensor that is none of the inputs gets a gradient.

    A graph would not compute it. Such tensors are attributes that are no parameters, and tensors of enclosing code.
    """
    input_ids, seen, todo = {id(x) for x in inputs}, set(), [out.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf: Tensor | None = getattr(node, "variable", None)  # of AccumulateGrad nodes
        if leaf is not None and id(leaf) not in input_ids:
            shape = tuple(leaf.shape)
            raise NotCapturable(f"it reads a tensor of shape {shape} that needs a gradient, but not as its parameter")
        todo += [each for each, _ in node.next_functions]


def check_output(out: Any, rows: int) -> None:
    """Raise NotCapturable if the output of a network is not one tensor with this many rows."""
    if not isinstance(out, Tensor) or out.ndim == 0 or len(out) != rows:
        raise NotCapturable("its output is not one tensor with a row for each of the vertices, or of its `outputs_at`")


def with_gradients(out: Tensor, inputs: Sequence[Tensor]) -> list[int]:
    """Run the backward pass and return the numbers of the inputs that get a gradient.

    Raises NotCapturable if a graph would lack a gradient, see `check_reads_only`.
    """
    check_reads_only(out, inputs)
    needed = [i for i, x in enumerate(inputs) if x.requires_grad] if out.requires_grad else []
    if not needed:
        return []
    seed = None if out.ndim == 0 else torch.zeros_like(out)  # with one, PyTorch imports SymPy for 2 s
    grads = torch.autograd.grad(out, [inputs[i] for i in needed], seed, allow_unused=True)
    return [i for i, grad in zip(needed, grads, strict=True) if grad is not None]


@contextmanager
def trial() -> Iterator[None]:
    """Turn errors of a first run on buffers into NotCapturable. Without graphs, the network runs or raises its own."""
    try:
        yield
    except (NotCounted, NotCapturable, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise NotCapturable(f"it can't run on buffers ({type(error).__name__}: {error})") from error


@contextmanager
def preserved(modules: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the buffers of modules and the random generators after the block."""
    buffers = list(modules.buffers())
    before = [buffer.clone() for buffer in buffers]
    try:
        with forked_random_numbers(device):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)


@contextmanager
def forked_random_numbers(device: torch.device) -> Iterator[None]:
    """Restore the random generators of PyTorch, Python and NumPy after the block."""
    before = random.getstate(), np.random.get_state()  # noqa: NPY002 - the state that old code uses
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002


def host_random_states() -> Hashable:
    """The states of the random generators of Python and NumPy."""
    _, keys, position, *_ = np.random.get_state()  # noqa: NPY002
    return random.getstate(), np.asarray(keys).tobytes(), position


def generator_of(device: torch.device) -> torch.Generator:
    """The random generator of a device."""
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
