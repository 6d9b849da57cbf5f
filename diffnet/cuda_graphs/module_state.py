"""The state of a module that a recorded graph depends on."""

from __future__ import annotations

import argparse
import random
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import is_dataclass
from enum import Enum
from functools import partial
from itertools import chain, count
from operator import attrgetter, is_, itemgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.parameter import is_lazy

_requires_grad, _changes = attrgetter("requires_grad"), attrgetter("_version")

# PyTorch's own attributes of a module: its parameters, buffers, submodules and hooks. All others belong to the class.
MACHINERY = frozenset(vars(nn.Module())) - {"training"}
GRAPHS = "_diffnet_graphs"  # the attribute in which `graphed` keeps its state

# Compared by value. Other objects, such as functions, are compared by identity.
_VALUES = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device, torch.Size)
CONTAINERS = (list, dict, set, deque)
MAX_FOLLOWED = 1000  # entries of a container. Comparing more would take longer than a graph saves.
MAX_NEW_STATES = 4  # calls in turn before each of which an attribute has got a new value
_RECORDS = (SimpleNamespace, argparse.Namespace)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


class _Identity:
    """Compares an object by identity. It keeps the object alive, so no other object gets the same id."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class ModuleState:
    """The submodules, parameters, buffers and attributes of a module.

    `is_current` compares all of them in some microseconds. Containers of up to `MAX_FOLLOWED` entries, dataclasses,
    namespaces and `partial` in attributes are followed. In-place changes of other objects, such as NumPy arrays, are
    not seen.

    before: an earlier state of the module

    parameters: of the module
    tensors: an object that is the same as before if all parameters are
    key: what a graph bakes in. Equal keys mean that one graph serves both states.
    generator: the name of an attribute that is a random generator. "" if there is none.
    """

    def __init__(self, module: nn.Module, before: ModuleState | None = None) -> None:
        self.module = module
        self.parameters = list(module.parameters())
        self.generator = ""
        self._submodules: list[nn.Module] = []
        self._dicts: list[dict[str, Any]] = []
        self._readers: list[itemgetter[Any]] = []
        self._views: list[Iterable[Any]] = []  # of dictionaries and containers, which follow every change
        self._tensors: list[Tensor] = []
        self._empty: list[dict[str, Any]] = []  # stores of modules, such as most of those for buffers
        self._hooks: list[dict[int, Any]] = []
        self._is_complete = True  # a lazy parameter has no memory before its first use
        self._names: list[str] = []  # of the entries of the key
        self._entries: list[Any] = []
        self._visit("", module, {})
        self._hooks = self._hooks[4:]  # hooks of the module itself are called around the graph
        cuda = any(x.is_cuda for x in self._tensors)
        # A graph on a GPU has copied the values of tensors on the CPU.
        self._hosts = [x for x in self._tensors if cuda and not x.is_cuda and not x.is_inference()]
        self.key: Hashable = (*self._entries, *map(_changes, self._hosts))
        self._seen = self._current()
        self._objects = [*self._members()]
        self._memory = [x.detach() for x in self._tensors]  # nothing else gets these addresses meanwhile
        same = before is not None and self._has_parameters_of(before)
        self.tensors: object = before.tensors if before is not None and same else object()

    def _visit(self, name: str, value: Any, visited: dict[int, int]) -> None:
        """Add an attribute, and all that it holds, to the key and to what `is_current` compares."""
        if isinstance(value, _VALUES):
            self._add(name, (type(value), value))
            return
        if id(value) in visited:
            self._add(name, visited[id(value)])
            return
        visited[id(value)] = len(visited)
        if isinstance(value, _GENERATORS):
            self.generator = self.generator or name
        if isinstance(value, Tensor):
            self._add(name, self._of_tensor(value))
        elif isinstance(value, nn.Module) and not isinstance(value, torch.jit.ScriptModule):
            self._add(name, type(value))
            self._visit_module(name, value, visited)
        elif isinstance(value, (*CONTAINERS, tuple, frozenset)) and len(value) > MAX_FOLLOWED:
            self._add(name, _Identity(value))
        elif isinstance(value, dict):
            self._views += value.keys(), value.values()
            self._add(name, (type(value), len(value)))
            for i, (key, each) in enumerate(value.items()):
                self._visit(f"{name}.keys[{i}]", key, visited)
                self._visit(f"{name}[{key!r}]", each, visited)
        elif isinstance(value, (*CONTAINERS, tuple, frozenset)):
            self._views.append(value)
            self._add(name, (type(value), len(value)))
            for i, each in enumerate(value):
                self._visit(f"{name}[{i}]", each, visited)
        elif isinstance(value, partial):
            self._add(name, (_Identity(value.func), len(value.args)))
            for member in (*value.args, value.keywords):
                self._visit(name, member, visited)
        elif (is_dataclass(value) or isinstance(value, _RECORDS)) and hasattr(value, "__dict__"):
            self._add(name, type(value))
            self._visit(name, vars(value), visited)
        else:
            self._add(name, _Identity(value))

    def _add(self, name: str, entry: Any) -> None:
        """Add an entry (hashable) to the key."""
        self._names.append(name)
        self._entries.append(entry)

    def _visit_module(self, name: str, module: nn.Module, visited: dict[int, int]) -> None:
        state = vars(module)
        unread = {GRAPHS, "metadata"} if type(module).__module__ == "diffnet.model" else {GRAPHS}
        names = [n for n in state if n not in MACHINERY and n not in unread]
        self._submodules.append(module)
        self._dicts.append(state)
        self._readers.append(itemgetter(*names, *names[:1]))
        stores = module._parameters, module._buffers, module._modules
        self._views += [store.values() for store in stores if store]
        self._empty += [store for store in stores if not store]
        self._hooks += _hooks_of(module)
        self._add(name, (*names, *(tuple(store) for store in stores)))
        for member, value in chain(((n, state[n]) for n in names), *(store.items() for store in stores)):
            self._visit(f"{name}.{member}" if name else member, value, visited)

    def _of_tensor(self, x: Tensor) -> Hashable:
        if is_lazy(x):
            self._is_complete = False
        if x.layout != torch.strided or is_lazy(x):
            return _Identity(x)
        self._tensors.append(x)
        return x.data_ptr(), x.shape, x.stride(), x.dtype, x.device, x.requires_grad

    def _members(self) -> Iterator[Any]:
        """The values of all attributes, and the entries of containers."""
        attributes = [read(state) for read, state in zip(self._readers, self._dicts, strict=True)]
        return chain(chain.from_iterable(attributes), chain.from_iterable(self._views))

    def _current(self) -> tuple[list[Any], ...]:
        return (
            [*map(Tensor.data_ptr, self._tensors)],
            [*map(type, self._submodules)],
            [*map(len, self._dicts)],
            [*map(_requires_grad, self._tensors)],
            [*map(_changes, self._hosts)],
        )

    def is_current(self) -> bool:
        """Whether nothing has been replaced, added or removed since."""
        if not self._is_complete or any(self._empty):
            return False
        try:
            members = [*self._members()]
        except KeyError:  # one attribute has been removed, and another one added
            return False
        same = len(members) == len(self._objects) and all(map(is_, members, self._objects))
        return same and self._current() == self._seen

    def _has_parameters_of(self, other: ModuleState) -> bool:
        """Whether the parameters are the same objects, and all tensors lie at the same addresses."""
        same = len(self.parameters) == len(other.parameters) and all(map(is_, self.parameters, other.parameters))
        return same and self._seen[0] == other._seen[0]

    def difference(self, before: ModuleState) -> str:
        """The name of the first attribute that has changed."""
        keys = zip(self._names, self._entries, before._entries, strict=False)
        return next((f"the attribute {name!r}" for name, a, b in keys if a != b), "the list of its submodules")

    def has_inner_hooks(self) -> bool:
        """Whether a submodule has hooks, or all modules have. A replayed graph would not call them."""
        return any(self._hooks) or _has_any_global_hook()  # type: ignore[no-untyped-call]

    def changes(self) -> list[int]:
        """The number of in-place changes of each parameter."""
        return list(map(_changes, self.parameters))


def _hooks_of(module: nn.Module) -> tuple[dict[int, Any], ...]:
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of its own, or all modules have."""
    return any(_hooks_of(module)) or _has_any_global_hook()  # type: ignore[no-untyped-call]


class KnownStates:
    """The states of a module, with their numbers.

    States with an equal key share a number. It stands for the key, which takes long to look up.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._by_key: dict[Hashable, int] = {}
        self._numbers = count()
        self._last: tuple[ModuleState, int] | None = None
        self._new_in_turn = 0

    def current(self) -> tuple[ModuleState, int, str | None]:
        """The state, its number, and a reason to warn if almost every call finds a new state."""
        before = self._last
        if before is not None and before[0].is_current():
            self._new_in_turn = 0
            return *before, None
        state = ModuleState(self._module, None if before is None else before[0])
        is_new = state.key not in self._by_key
        number = self._by_key.setdefault(state.key, next(self._numbers))
        # Another thread may read this at any time.
        self._last = state, number
        if is_new and before is not None:
            self._new_in_turn += 1
            if self._new_in_turn > MAX_NEW_STATES:
                return state, number, f"{state.difference(before[0])} changes in almost every call"
        return state, number, None

    def clear(self) -> None:
        """Forget the numbers. Later states get other ones."""
        self._by_key.clear()


def settings() -> Hashable:
    """The settings of PyTorch that a graph bakes in."""
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.backends.cuda.matmul.fp32_precision,
        torch.are_deterministic_algorithms_enabled(),
    )
