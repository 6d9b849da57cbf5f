"""Values that frozen dataclasses compute at first use and then remember.

Such a value is a plain attribute, not a field. `dataclasses.replace` therefore drops it, and so does torch.compile when
it rebuilds a dataclass through its constructor. `__post_init__` sets it to None with `remember`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields
from typing import Any, Generic, TypeVar

import torch

from diffnet.ops.common.compiler import PLAIN_TYPES, under_transforms
from diffnet.ops.common.cuda_graph import is_recorded
from diffnet.ops.common.launcher import compiles_only

S = TypeVar("S")
T = TypeVar("T")


def memoized(instance: S, name: str, compute: Callable[[S], T]) -> T:
    """Return an attribute of a frozen dataclass; if it is None, compute it and store it first.

    While torch.export or a transform of torch.func runs, new tensors are stand-ins, so nothing is stored.

    This is no cached property, because torch.compile would not see its cache and would trace the computation into every
    step.
    """
    value: T | None = getattr(instance, name)
    if value is None:
        inference = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
        with torch.inference_mode(False) if inference else nullcontext():  # training may use the value, too
            value = compute(instance)
        if not under_transforms() and type(torch.empty(0)) in PLAIN_TYPES:
            remember(instance, **{name: value})
    return value


def remember(instance: S, **values: object) -> S:
    """Set attributes of a frozen dataclass that depend on its fields alone, and return the instance."""
    for name, value in values.items():
        object.__setattr__(instance, name, value)
    return instance


class FieldwiseCopy:
    """A base of frozen dataclasses that Lightning can convert.

    Lightning puts the fields into the memo of `copy.deepcopy`, copies the object, and sets each field of the copy. Such
    a copy takes its fields in order, and is an ordinary object after the last one.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        this: Any = self
        cls: Any = type(self)
        values = [getattr(this, field.name) for field in fields(this)]
        if all(id(value) in memo and memo[id(value)] is value for value in values):
            draft = object.__new__(_draft_class(cls))
            vars(draft)["original"] = self
            return draft
        make, arguments, state = this.__reduce_ex__(4)[:3]
        result = memo[id(self)] = make(*arguments)
        vars(result).update(copy.deepcopy(state, memo))
        return result


@functools.cache
def _draft_class(cls: Any) -> type[Any]:
    """The class of a copy of which not all fields are set."""
    names = [field.name for field in fields(cls)]

    def set_field(draft: Any, name: str, value: Any) -> None:
        vars(draft)[name] = value
        if name != names[-1]:
            return
        original, *values = (vars(draft).pop(part) for part in ("original", *names))
        object.__setattr__(draft, "__class__", cls)
        if all(value is getattr(original, name) for name, value in zip(names, values, strict=True)):
            vars(draft).update(vars(original))  # with what it remembers
        else:
            cls.__init__(draft, *values)

    return type(cls.__name__, (cls,), {"__setattr__": set_field})


def can_remember() -> bool:
    """Return whether a tensor computed now holds its values later, too.

    It doesn't while torch.compile or torch.func traces, while kernels are compiled without running, and while a CUDA
    graph is recorded: the graph computes the tensor in each replay, not now.
    """
    if torch.compiler.is_compiling() or under_transforms() or compiles_only():
        return False
    return not is_recorded()


class Later(Generic[T]):
    """A value that is computed when it is first needed, and then remembered. Several objects may share it."""

    def __init__(self, compute: Callable[[], T]) -> None:
        self._compute: Callable[[], T] | None = compute
        self._value: T | None = None

    @property
    def known(self) -> bool:
        return self._compute is None

    def get(self) -> T:
        compute = self._compute
        if compute is None:
            return self._value  # type: ignore[return-value]
        with torch.inference_mode(False):  # training may use the value, too
            value = compute()
        if can_remember():
            self._value, self._compute = value, None  # frees the tensors that only `compute` needs
        return value
